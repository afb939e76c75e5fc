"""The life of a request in the router, from its arrival to its last event.

Read `client_request.py` first: a client's call and its request, and those that run. `lifecycle.py` serves a request and
its choices, in `serve_request` and `serve_choice`. `attempt.py` is one attempt on a pair of workers, with a state
diagram. `delivery.py` merges tokens and thoughts, and writes the client's events. `observer.py` writes each transition
to the history, the log, metrics, activity and traces. `traces.py` records stages and spans.
"""
