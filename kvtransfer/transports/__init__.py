"""Transports: the data channels that move frames of KV between two workers.

Start with `base`: the contract of a channel, and the ring of staging slots that all ends have. `rendezvous` connects
the two ends, and `select` makes the transports of a worker. The transports are `memory` (one process), `shm` with
`unix_socket` (one host), `cuda_ipc` (one GPU), `torch_dist` (gloo and NCCL) and `grpc` (with TLS).
"""
