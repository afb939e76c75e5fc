"""Decode workers: receive a prompt's KV cache and stream the remaining tokens."""
