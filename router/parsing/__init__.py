"""Parsing of client requests, before any worker is involved.

Read `generate_request.py` first: it makes a `SequenceSpec` of a request, checks it, and limits concurrent parsing.
`chat.py` renders conversations to prompts. `chat_template.py` is the sandbox in which the model's template runs.
"""
