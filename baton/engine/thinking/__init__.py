"""Models that think about their prompts (Thinking States, arXiv 2602.08332), on the engine's side.

Read `progress.py` first: chunks, thoughts and how far a sequence is. `states.py` then adds states to a forward, and
makes thoughts from its hidden rows. The neural blocks themselves are in `baton/engine/models/thinking.py`.
"""
