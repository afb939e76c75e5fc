"""The command line, and the composition root: only here do the cluster, the router and the worker roles meet.

`main.py` maps errors to exit codes. `app.py` lists the commands. They are in five packages: `cluster` (run and change a
cluster), `inspect` (show it), `requests` (use it), `setup` (prepare it) and `sizing` (measure and plan it). Modules
with commands import grpc, pydantic, torch and ray only when a command runs, so that `--help` stays fast. `options.py`
has their common options, and `target.py` the cluster that a command is for.
"""
