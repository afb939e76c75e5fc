"""Baton, simulated: the production policy, admission and handoff states under a virtual clock."""
