"""The life of a request in the router, from its arrival to its last event.

Read `client_request.py` first: a client's request and its choices. `lifecycle.py` has the life of one choice, in
`serve_choice`. `attempt.py` is one attempt on a pair of workers, with a state diagram. `delivery.py` merges tokens and
writes the client's events, `thoughts.py` those of a model that thinks. `traces.py` records stages and spans.
"""
