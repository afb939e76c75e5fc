"""Commands that show a running cluster.

`status.py` (with `block_census.py`), `trace.py` and `logs.py` (with `log_lines.py`) print once; `top/` is a live view
in the terminal.
"""
