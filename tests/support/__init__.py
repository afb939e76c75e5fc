"""Doubles and helpers that several suites share: one for each thing, named after what it stands for."""
