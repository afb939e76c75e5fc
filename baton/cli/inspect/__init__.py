"""Commands that show a running cluster. `status.py`, `trace.py` and `logs.py` declare them.

`block_census.py` is the work of `baton status --census`, `log_lines.py` that of `baton logs`, and `top/` that of
`baton top`.
"""
