"""Observation of this router for operators.

Read `activity` first: metrics of the last minute, and the event feed. `status` has the status reply, a shared cache of
views, and their stream to watchers.
"""
