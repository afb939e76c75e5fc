"""Speculative decoding with exact acceptance (docs/design/speculation.md).

A decode step computes the last token of a sequence and `k` proposed ones behind it. Each next token is drawn as usual.
A proposal is accepted if it is the drawn token, so the stream is the one without speculation.

Read in this order: `proposer.py` (the protocol), `suffix_index.py` (proposals from the sequence's own tokens),
`draft.py` and `prediction.py` (proposals of models), `control.py` (how many proposals pay), `forwards.py` (step and
acceptance), `checks.py` (equal bits of rows).
"""
