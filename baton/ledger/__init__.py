"""The Redis ledger: leases, ownership of KV, the prefix directory and the control state. No request waits for it.

Read `redis_client` (connection and scripts), then `registry` (incarnations and leases). `background_writer` is the base
of the two writers: `ownership` (which worker holds a request's KV) and `prefix_directory` (cached blocks per worker).
`prefix_index` is the copy of that directory in a router's memory. `control_state` holds plans, orders and reports.
`embedded_redis` starts a Redis for one machine.
"""
