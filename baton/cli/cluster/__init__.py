"""Commands that run a cluster and change it, declared by `up.py` and `operate.py`. Read `launch.py` first."""
