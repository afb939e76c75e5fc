"""Commands that show a running cluster. `status.py`, `trace.py` and `logs.py` declare them."""
