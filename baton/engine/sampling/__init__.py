"""Sampling: from the logits of a step to tokens, with results that do not depend on the rest of the batch.

Read `sampler.py` first: it has the order of all operations, and the draw. `logits.py` applies penalties, bias, bans and
constraints. `filters.py` has min-p, top-k and top-p. `noise.py` has the hashes that replace a random generator.
`output.py` turns the drawn tokens of a sequence into text and finds its end.
"""
