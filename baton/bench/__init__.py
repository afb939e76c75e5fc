"""The load generator of `baton bench`: sends a load to a server and reports latencies, throughput and goodput.

Read `requests.py` (options become a load) first, then `runner.py` (loops) and `targets.py` (gRPC and HTTP servers).
`sample.py`, `report.py`, `output.py` and `compare.py` turn samples into figures and a plot. `lengths.py`, `workload.py`
and `traces.py` make lengths, arrival times and prompts; `baton.planner` uses them too.
"""
