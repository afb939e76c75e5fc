"""Memory of the engine that torch's allocators do not manage alone.

huge_pages    weights and KV on huge pages
staging       the integers of a step, staged for a device in one copy
"""
