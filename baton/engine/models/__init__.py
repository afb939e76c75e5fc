"""Model families: configuration, weights and layers.

Read `loading` first: it builds a backend for the engine from a model folder. It uses the others in this order:

    config, config_variants, json_fields, rope    config.json as checked values
    checkpoint, formats/, uploads                 tensors from safetensors files into their final memory
    llama, moe, deepseek, thinking                the layers
    fallback                                      models without a family, in transformers
"""
