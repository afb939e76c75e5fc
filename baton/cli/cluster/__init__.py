"""Commands that run a cluster and change it. `up.py`, `operate.py` and `controller.py` declare them.

Read `launch.py` (start and stop a cluster) first, then `serve.py` (one role as a process) and `operator.py` (calls to a
running cluster). `demo.py` is a short tour.
"""
