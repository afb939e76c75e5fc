"""OpenAI's Responses API, `/v1/responses`, as a translation of chat.

`schema.py` has the body. `chat.py` makes a `ChatBody` of it, so that the job is that of chat. `answer.py` translates
the answer back: the whole one, and each chunk of a stream. Nothing is stored.
"""
