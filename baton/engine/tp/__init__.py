"""Tensor parallelism: one model computed by several processes of one machine, its ranks.

Each rank holds its share of the heads and of the feed-forward width, and the parts are summed twice a layer. The model
files know nothing of it: `shard` gives them a smaller config and parts that read a slice of each weight.

    shard       what a rank holds, which models can be divided, the layers that exchange
    exchange    how parts get from rank to rank: shared memory, gloo or NCCL
    messages    a batch as numbers, from rank 0 to the others
    ranks       the process group of the ranks, how it is met and what it is built from
    heads       which rank holds which heads of KV, and what moves between workers of different sizes
    cache       the KV of all heads over caches of ranks
    memory      where the KV of the ranks lies, and how rank 0 reaches it
    follower    the process of a rank above 0
    backend     the model as the engine on rank 0 sees it
"""
