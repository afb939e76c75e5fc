"""Transports: the data channels that move frames of KV between two workers.

Start with `base`: the contract of a channel, the exchange of rendezvous keys, and the ring of staging slots that all
ends have. `select` makes the transports of a worker: `shm` with `unix_socket` (one host), `cuda_ipc` (one GPU),
`torch_dist` (gloo and NCCL) and `grpc` (with TLS).
"""
