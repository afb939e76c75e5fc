"""The transformer engine that prefill and decode workers share.

Read `sequence.py` and `request.py` (state of one request), `engine.py` (one step), `scheduler.py` (choice of its work),
then `block_pool.py` and `prefix_cache.py` (KV blocks). `model_runner.py` runs a `ModelBackend`: a transformer of
`models/`, on `kernels/` and `tp/`, or the test model `oracle.py`. `sampling/` draws tokens and turns them into text.
`determinism/` and `thinking.py` are features that only some requests or models use.
"""

from baton.logs import log_to_stderr_by_default

log_to_stderr_by_default()
