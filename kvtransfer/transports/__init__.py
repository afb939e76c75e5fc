"""Transports: the data channels that move frames of KV between two workers.

Start with `base`: the contract of a channel, the exchange of rendezvous keys, and the ring of staging slots that
two-sided ends have. `select` makes the transports of a worker. On one host, `shm` and `cuda_ipc` read the sender's
pool, with `host_pool` and `unix_socket`; `nixl` with `nixl_agent` reads staging over a network. `torch_dist` (gloo and
NCCL) and `grpc` (with TLS) send frames.
"""
