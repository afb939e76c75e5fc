"""Layers that keep a state for each sequence instead of KV for each token.

`spec.py` describes the kinds of layers and the size of their state. `conv.py` has the causal convolution that all of
them contain, and the short convolution of LFM2.

The state of a sequence is one row of float32 numbers (`baton.engine.states`). Each layer has its own part of the row.
"""
