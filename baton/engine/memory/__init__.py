"""Memory that the engine takes outside torch's allocators.

huge_pages    weights and KV on huge pages
staging       the integers of a step, staged for a device in one copy
"""
