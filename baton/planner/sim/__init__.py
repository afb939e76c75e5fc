"""Discrete-event simulator: the production policy, admission, scheduler and handoff states under a virtual clock.

`cluster.simulate(Scenario, arrivals)` returns a `stats.Report`. Reading order: `scenario` (inputs), `event_loop`
(virtual time), `cluster`, `request` (requests and router), `worker`, `engine`, `timing`, `block_pool`, `network`
(workers), `stats` (results).
"""
