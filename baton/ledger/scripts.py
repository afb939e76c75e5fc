"""The scripts of `Ledger`, which tells the rules. Each is one decision in one round trip and answers {epoch, ...}."""

from __future__ import annotations

from baton.ledger.connection import Script

# Begins every script here.
# KEYS 1-3: epoch, counter, grace. ARGV 1-4: highest epoch and counter that the caller knows of, its wall clock in
# microseconds, lease ms. Epochs are about 2e15, so tostring() would round them: format with %.0f.
_EPOCH = """
local epoch = tonumber(redis.call('GET', KEYS[1]) or '') or 0
local counter = tonumber(redis.call('GET', KEYS[2]) or '') or 0
local known, counted = tonumber(ARGV[1]), tonumber(ARGV[2])
local function begin()
  local now = redis.call('TIME')
  epoch = math.max(known + 1, epoch + 1, tonumber(ARGV[3]), now[1] * 1000000 + now[2])
  redis.call('SET', KEYS[1], string.format('%.0f', epoch))
end
if epoch < known or (epoch == known and counter < counted) then
  begin()
  redis.call('SET', KEYS[3], 1, 'PX', ARGV[4])
end
"""


def _decision(text: str) -> Script:
    return Script(_EPOCH + text)


# KEYS 4: place, of no worker for a caller that names none. Answers the ms to wait, or 0 and the counter.
MINT = _decision("""
if epoch == 0 then begin() end
local wait = redis.call('PTTL', KEYS[3])
if wait > 0 and redis.call('EXISTS', KEYS[4]) == 0 then return {epoch, wait, 0} end
return {epoch, 0, redis.call('INCR', KEYS[2])}
""")

# KEYS 4-6: place, worker, workers. ARGV 5-9: epoch, counter, worker id, info, place TTL ms.
REGISTER = _decision("""
local place = redis.call('GET', KEYS[4])
local e, c = string.match(place or '', '^(%d+)%.(%d+)$')
local mine, my_epoch = ARGV[5] .. '.' .. ARGV[6], tonumber(ARGV[5])
e, c = tonumber(e or 0), tonumber(c or 0)
if e > my_epoch or (e == my_epoch and c > tonumber(ARGV[6])) then return {epoch, 0} end
if not place and my_epoch < epoch then redis.call('SET', KEYS[3], 1, 'PX', ARGV[4], 'NX') end
redis.call('DEL', KEYS[5])
redis.call('HSET', KEYS[5], 'incarnation', mine, 'info', ARGV[8], 'progress', 0)
redis.call('PEXPIRE', KEYS[5], ARGV[4])
redis.call('SET', KEYS[4], mine, 'PX', ARGV[9])
redis.call('SADD', KEYS[6], ARGV[7])
redis.call('PEXPIRE', KEYS[6], ARGV[9])
return {epoch, 1}
""")

# KEYS 4-6: place, worker, workers. ARGV 5-7: incarnation, progress, place TTL ms.
RENEW = _decision("""
if redis.call('HGET', KEYS[5], 'incarnation') ~= ARGV[5] then return {epoch, 0} end
redis.call('HSET', KEYS[5], 'progress', ARGV[6])
redis.call('PEXPIRE', KEYS[5], ARGV[4])
redis.call('PEXPIRE', KEYS[4], ARGV[7])
redis.call('PEXPIRE', KEYS[6], ARGV[7])
return {epoch, 1}
""")

# KEYS 4-6: place, worker, workers. ARGV 5-6: incarnation, worker id.
DEREGISTER = _decision("""
if redis.call('HGET', KEYS[5], 'incarnation') ~= ARGV[5] then return {epoch, 0} end
redis.call('SREM', KEYS[6], ARGV[6])
return {epoch, redis.call('DEL', KEYS[5])}
""")

# KEYS 4: workers. ARGV 5: the prefix of the workers' keys. An id without a key is forgotten, in the same moment.
WORKERS = _decision("""
local rows = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[4])) do
  local row = redis.pcall('HMGET', ARGV[5] .. id, 'incarnation', 'info')
  if row.err then row = {false, false} end
  if redis.call('EXISTS', ARGV[5] .. id) == 0 then redis.call('SREM', KEYS[4], id)
  else rows[#rows + 1] = {id, row[1], row[2]} end
end
return {epoch, rows}
""")
