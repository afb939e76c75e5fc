"""KV transfer: move a prompt's KV cache from one worker to another, whole or not at all."""
