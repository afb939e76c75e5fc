"""Receipts of deterministic answers: their form and digests (`form.py`), Ed25519 signatures (`keys.py`), the router's
issuer (`issuer.py`), and the comparison with an answer that was computed again (`compare.py`).
"""
