"""The command line, and the composition root: only here do the cluster, the router and the worker roles meet.

`main.py` maps errors to exit codes. `app.py` declares the commands; each imports its module when it runs, so that
`--help` stays fast. Read `up.py` (start and stop a cluster) and `serve.py` (one role as a process) first. `target.py`
and `credentials.py` find the router that a command calls. `operate.py`, `status.py`, `logs.py` and `top/` are for
operators. `doctor.py`, `profile_*.py`, `plan.py` and `bench.py` check, measure and size a cluster.
"""
