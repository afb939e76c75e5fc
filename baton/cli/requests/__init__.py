"""Commands that send requests: `generate.py` one, `chat.py` a conversation, and `bench.py` a load with a report."""
