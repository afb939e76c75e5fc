"""The host process of a worker: engine thread, control streams, registration and heartbeat. It imports no role.

Read `process` (the process, one incarnation after the other) first. Then read `lifecycle` (one incarnation from
registration to exit), `engine_loop` (the engine thread) and `service` (the gRPC service for routers). `role` is the
interface that prefill and decode workers implement, and their common part. `settings` and `engine_factory` lead from
the cluster file to an engine. The rest are parts: `events`, `handoff_timing` and `block_census`.
"""
