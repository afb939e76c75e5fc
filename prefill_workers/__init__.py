"""Prefill workers: compute the KV cache and the first token of a prompt."""
