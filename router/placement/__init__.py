"""Placement: which workers take a request.

Read `snapshot.py` first: all workers as columns of numbers. `policy.py` has the policies, pure functions that choose
from a snapshot. `fleet.py` keeps the snapshot up to date. `cost_model.py` fits what steps cost to workers' reports.
"""
