"""Admission: which request gets a placement next, which ones wait, and which ones are rejected.

Read `fair_queue.py` first: the order of the queue, without clock or I/O. `admission.py` is the queue with its limits
and its wait prediction, and holds requests that no connected worker can serve.
"""
