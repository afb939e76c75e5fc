"""The processes of a cluster: placement, supervision, role changes, scaling and shutdown.

This package imports no role: `baton.cli` passes in actor classes and commands. Start with `interfaces.py` (`Control`,
`Placement`) and `launcher.py` (the life of a cluster). Then read `controller.py`, `reconcile.py` and
`worker_supervisor.py` (workers follow the plan), and `autoscaler.py` (changes the plan). `backend_*.py` start workers;
`controller_*.py` host the controller.
"""
