"""The command line, and the composition root: only here do the cluster, the router and the worker roles meet.

`app.py` lists the commands. Their modules import grpc, pydantic, torch and ray only when a command runs, so that
`--help` stays fast. `options.py` has their common options, and `target.py` the cluster that a command is for.
"""
