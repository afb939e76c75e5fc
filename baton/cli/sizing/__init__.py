"""Commands that measure and size a cluster.

`profile.py` declares `baton profile`: `profile_kernels.py` measures this machine, `profile_live.py` a running cluster.
`plan.py` declares `baton plan`, and `planning.py` simulates with such a profile.
"""
