"""TODO determinism"""
