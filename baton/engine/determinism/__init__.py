"""Deterministic requests: tokens that depend neither on the rest of the batch nor on the choice of an equal worker.

Read `shapes.py` first (the idea, and the shapes of fixed forwards), then `planner.py` (choice of the next one) and
`verifier.py` (its inputs and results). `checks.py` tests a loaded model, computes the fingerprint of its bits and
measures how large verify passes should be.
"""
