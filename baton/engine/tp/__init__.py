"""Tensor parallelism: one model computed by several processes of one machine, its ranks.

Each rank holds its share of the heads and of the feed-forward width, and the parts are summed twice a layer. The model
files do not depend on it: `sharding` gives them a smaller config and parts that read a slice of each weight.

    backend, rank_process     the model on rank 0, and the processes of the other ranks
    rank_model                what one rank computes: forwards, and graphs of decode steps
    sharding                  the parts of a rank, and which rank reads which KV from which other one
    group                     the process group, its messages, and the exchange over shared memory, gloo or NCCL
    kv_memory                 the KV of all heads over caches of ranks, and its memory
    watchdog                  the end of a worker whose GPUs hang
"""
