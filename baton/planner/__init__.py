"""Capacity planner behind `baton profile` and `baton plan`.

Reading order: `profile` (step costs as a JSON file), `sim` (simulator around the production policy and admission),
`search` (cheapest pools for a goal). `live_fit` makes a profile of measurements of a live cluster.
"""
