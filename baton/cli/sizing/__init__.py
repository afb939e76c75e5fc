"""Commands that measure and size a cluster. `commands.py` declares them."""
