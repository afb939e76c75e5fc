"""The load generator of `baton bench`: sends a load to a server and reports latencies, throughput and goodput.

Read `requests.py` (options become a load) first, then `runner.py` (loops) and `targets.py` (gRPC and HTTP servers).
"""
