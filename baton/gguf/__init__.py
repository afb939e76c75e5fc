"""GGUF files, the form of llama.cpp: one file with metadata, tokenizer and weights. No torch.

`model_folder` of `baton.model_hub` unpacks a file into a folder as the Hub has it, so that all other code reads one
form. Read `header` first, which parses the file; then `architectures` and `config`, which make a config.json;
`convert_tokenizer`, a program that makes a tokenizer.json with transformers, which `conversion` runs; and `folder`,
which writes them. The weights stay in the file: `baton.engine.models.formats.gguf` reads them.
"""
