"""KV transfer: moves the KV cache of a prompt from one worker to another, completely or not at all.

Start with `handoff`: the values of a handoff, and the table that accepts or rejects KV. `frames` decides which part of
the KV travels in one frame, and `wire` converts both to messages of the `Peer` service. The sending side is `sender`,
then `send_queue`. The receiving side is `receiver`, then `receive_loop`. The bytes travel through a channel of
`transports`.
"""
