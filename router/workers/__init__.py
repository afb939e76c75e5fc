"""The workers as this router sees them.

Read `stream.py` first: the stream to one worker, and the mailboxes of requests. `placement.py` is the choice of workers
for one attempt, counted as loaded. `pool.py` follows the ledger, keeps all streams, and makes placements by policy.
"""
