"""Observation of this router for operators.

Read `request_observer` first: it writes each transition of a request to the history, the log, metrics, activity and
traces. `activity` has metrics of the last minute, and the event feed. `status` has the status reply, a shared cache of
views, and their stream to watchers.
"""
