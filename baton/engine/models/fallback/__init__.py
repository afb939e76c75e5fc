"""Models without a native family: their layers run in `transformers`, their attention in Baton's paged KV cache.

    choice        native or transformers, by the setting and config.json
    loading       a model folder into a backend: guards, weights, layout, self-check
    guard         refusals by name: models with a layer that is no causal attention through the interface
    attention     the functions that transformers calls for attention and masks
    self_check    packed chunks against transformers' own forward

No other part of Baton imports transformers, which is an extra.
"""
