"""Readers of a model's text: reasoning, content and tool calls, found while the answer streams.

Read `text.py` first: `Source` is the text so far, read by generators that wait for more. `calls.py` has the forms of
tool calls, `harmony.py` the channels of gpt-oss. `answer.py` combines reasoning and calls into one reader. The names of
the forms, and how the router detects them in a checkpoint, stand in `router/parsing/model_forms.py`.
"""
