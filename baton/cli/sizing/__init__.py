"""Commands that measure and size a cluster. `commands.py` declares them.

`profile_kernels.py` measures this machine, and `profile_live.py` a running cluster. `planning.py` simulates with such a
profile.
"""
