"""Prefill workers: compute the KV cache and the first token of a prompt, and push them to a decode worker.

Start with `worker`, the role. `prefix_fetch` fetches KV from the decode worker if that is cheaper than computing it.
"""
