"""Baton, simulated: the production policy, admission and handoff states under a virtual clock.

simulate(Scenario, arrivals) -> Report

scenario  what is simulated      steps     what a step costs
report    what came of it        histogram percentiles in flat memory
cluster   all of it together: kernel (time), router and life (a request), attempt, worker*, engine, blocks, links
"""
