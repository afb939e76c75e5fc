"""Try the fallback with a tiny random model of each causal language model class that the installed transformers has.

    python -m tools.fallback_models                  # all of them, results to tools/reference/fallback.json
    python -m tools.fallback_models gemma2 mamba     # print these

A model is exact if each greedy token and each logit (within 1e-3 standard deviations of its row) equals that of
transformers' own eager attention in float32: prompts of 1 to 300 tokens, in random chunks, in a cache full of NaN.
`make fmt` writes the results into docs/reference/models.md.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from baton.engine.models.fallback.guard import checked_config
from baton.engine.models.fallback.loading import FallbackBackend, load_transformers
from baton.engine.models.fallback.self_check import differing
from baton.engine.models.json_fields import Fields, read_json_object
from baton.errors import CheckpointError
from tests.unit.model.checkpoints import VOCAB
from tests.unit.model.harness import greedy, prompts

RESULTS = Path(__file__).parent / "reference/fallback.json"
MOST = 30_000_000  # parameters
LENGTHS, NEW, SEED = (1, 2, 17, 33, 64, 100, 300), 12, 3
# Values for the keys that a config has. Windows are shorter than the prompts, and soft caps low: they decide tokens.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "sliding_window": 24, "window_size": 24,
    "attention_chunk_size": 32, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512, "n_inner": 96,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_topk": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "moe_num_experts": 8, "moe_k": 2,
    "num_nextn_predict_layers": 0, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "index_topk": 2048, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB, "global_head_dim": 32, "ffn_dim": 96,
    "word_embed_proj_dim": 64, "d_model": 64, "decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 96,
    "num_layers": 4, "num_heads": 4, "kv_channels": 16, "multi_query": True, "max_window_layers": 2,
    "use_sliding_window": True, "num_kv_shared_layers": 0, "num_global_key_value_heads": 2, "state_size": 8,
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 32, "conv_kernel": 4, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
    "swa_head_dim": 16, "qk_head_dim": 24, "rotary_dim": 8, "embedding_size": 64, "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32, "attn_logit_softcapping": 1.5,
}  # fmt: skip
OVERRIDES: dict[str, dict[str, Any]] = {
    "dots1": {"n_shared_experts": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gemma3n_text": {"num_kv_shared_layers": 2},
}


def tiny_config(model_type: str, **changed: Any) -> Any:
    """Return the config of a model type with the sizes above, and those `changed`."""
    default = transformers.AutoConfig.for_model(model_type)
    known = {*default.to_dict(), *default.attribute_map}
    sizes = {key: value for key, value in SIZES.items() if key in known}
    if "kv_lora_rank" in known:  # latent attention: as many heads of keys, as wide as their rotary part
        sizes |= {"num_key_value_heads": 4} | ({"head_dim": 8} if "head_dim" in known else {})
    sizes |= OVERRIDES.get(model_type, {}) | changed
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    kinds = sorted({*(default.to_dict().get("layer_types") or ())})
    if {*kinds} - {*(config.to_dict().get("layer_types") or ())}:  # each kind of layer of the full size
        sizes["layer_types"] = (kinds * 4)[:4]
        config = transformers.AutoConfig.for_model(model_type, **sizes)
    return config


def write(model_type: str, folder: Path, **changed: Any) -> Any:
    """Write a random checkpoint whose attention decides the tokens. Return the model."""
    config = tiny_config(model_type, **changed)
    with torch.device("meta"):
        size = transformers.AutoModelForCausalLM.from_config(config).num_parameters()
    if size > MOST:
        raise ValueError(f"{size / 1e6:,.0f} million parameters with the sizes of this tool")
    torch.manual_seed(SEED)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.float().eval().save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@torch.inference_mode()
def difference(backend: FallbackBackend, oracle: Any) -> str:
    """Return the first position that differs, or ""."""
    some = prompts(LENGTHS)
    for prompt, row in zip(some, greedy(backend, some, NEW, random.Random(SEED)), strict=True):
        tokens = torch.tensor([row.tokens])
        wanted = oracle(input_ids=tokens, position_ids=torch.arange(len(row.tokens))[None], use_cache=False).logits[0]
        if row.tokens[len(prompt) :] != wanted[len(prompt) - 1 : -1].argmax(-1).tolist():
            return f"a token after {len(prompt)} others"
        seen = sorted(row.logits)
        if wrong := differing(torch.stack([row.logits[at] for at in seen]), wanted[seen].float(), 1e-3):
            return f"position {seen[wrong[0]]} of {len(prompt)} + {NEW} tokens"
    return ""


def tried(model_type: str) -> tuple[str, str]:
    """Return exact, refused, wrong or not built, and the reason."""
    with tempfile.TemporaryDirectory() as name:
        try:
            config = tiny_config(model_type)
            config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
            config.save_pretrained(name)
            path = Path(name) / "config.json"
            checked_config(Fields(str(path), read_json_object(path)), name)
            oracle = write(model_type, Path(name))
        except CheckpointError as error:
            return "refused", str(error).replace(f"{name}/", "")[:200]
        except Exception as error:  # noqa: BLE001  (the boundary to the code of any architecture)
            return "not built", f"{type(error).__name__}: {error}".splitlines()[0][:200]
        try:
            found = difference(load_transformers(name, dtype="float32"), oracle)
        except CheckpointError as error:
            return "refused", str(error).replace(f"{name}/", "").replace(name, "it").splitlines()[0][:200]
        except Exception as error:  # noqa: BLE001  (a fault of the fallback, which the table shows)
            return "failed", f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return ("wrong", found) if found else ("exact", "")


def run(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Try all, and print each result."""
    results = {}
    for name in names:
        results[name] = tried(name)
        print(name, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name], *results[name], flush=True)
    return results


def main(names: list[str]) -> None:
    """Run, and write the results of a run of all."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    results = run(names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    print(dict(Counter(result for result, _ in results.values())))
    if not names:
        facts = {"date": datetime.now(UTC).date().isoformat(), "transformers": transformers.__version__}
        rows = {name: [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name], *result] for name, result in results.items()}
        RESULTS.write_text(json.dumps({**facts, "models": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
