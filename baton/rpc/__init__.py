"""The gRPC layer that clients, router and workers share: channels, errors and messages. `v1` is generated.

Read `channel` first (channels and servers with options and TLS). Then read `status` (errors as gRPC statuses, and back)
and `convert` (protobuf messages to the values of `baton.core`, and back).
"""
