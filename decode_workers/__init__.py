"""Decode workers: receive the KV cache of a prompt and stream the remaining tokens.

Start with `worker`, the role, and `reservations`, which decides which writes and commits count. `detached_streams`
keeps streams after their router died.
"""
