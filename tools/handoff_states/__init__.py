"""A bounded exhaustive check of the handoff: the production classes under all orders of events, and with planted bugs.

`doubles` replaces time, tensors and the engine. `processes` has the router's request and the two workers, `world` their
events, faults and invariants. `states` identifies and restores states, `explore` searches, `bugs` plants bugs.
"""
