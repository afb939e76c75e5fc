"""Pools on CPUs whose KV memory, ranks or speculation do not fit the model, found before anything starts.

An estimate from config.json finds pools in doubt. Only for these the engine's rules are applied: their import is slow.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from baton.cluster.gpus import ON_THIS_HOST
from baton.config import ClusterConfig, PoolConfig
from baton.core import KVLayout, Role
from baton.errors import ConfigError
from baton.model_hub import model_folder
from baton.tokenizer import ORACLE_MODEL

BLOCK = 16  # tokens, for `auto`
RECURRENT = {"layers_block_type", "attn_layer_indices", "mamba_n_heads", "linear_num_key_heads", "conv_L_cache"}
UNUSUAL = RECURRENT | {"global_head_dim", "per_layer_config", "index_head_dim"}  # other rows of KV
NEEDED = {"num_attention_heads", "hidden_size", "num_hidden_layers", "head_dim"}  # others than of Llama may be absent


def check_sizes(config: ClusterConfig, on_gpus: Collection[Role]) -> None:
    """Raise ConfigError with the key of a pool that a worker would reject. The model must be downloaded."""
    if config.decode.speculation == "mtp" and config.ray.address in ON_THIS_HOST:  # other hosts may have the weights
        _check_prediction(config, "cuda" if Role.DECODE in on_gpus else "cpu")
    if config.model.path == ORACLE_MODEL:
        return
    folder = model_folder(config.model.path, weights=False)
    for role, pool in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode)):
        if pool.replicas and role not in on_gpus and (pool.tensor_parallel > 1 or _in_doubt(config, pool, folder)):
            _check(config, role, pool, folder)


def _check_prediction(config: ClusterConfig, device: str) -> None:
    """Raise ConfigError if the model has no layer for multi-token prediction, or if the pool cannot use it."""
    from baton.engine.models.checkpoint import Checkpoint
    from baton.engine.models.config import read_config
    from baton.engine.models.loading import check_prediction
    from baton.worker.engine_factory import served_by
    from baton.worker.settings import from_config
    from baton.worker.speculation_choice import predicts

    settings = from_config(config, Role.DECODE, "check")
    predicts(settings, device)
    folder = model_folder(config.model.path)
    if served_by(settings):
        raise ConfigError(f"decode.speculation: mtp is not supported for {folder}, which runs in transformers")
    model = read_config(folder)
    check_prediction(model, Checkpoint(folder, digests=False, stored=model.quantised))


def _in_doubt(config: ClusterConfig, pool: PoolConfig, folder: Path) -> bool:
    """Whether `kv_memory` may be too small, by an estimate that holds for plain decoders. Recurrent layers have states
    instead of KV, and other layers other heads, so their models are in doubt.
    """
    if pool.kv_memory == "auto":
        return False
    try:
        fields = json.loads((folder / "config.json").read_bytes())
        whole, fields = fields, fields.get("text_config") or fields
        inside = fields is not whole and not fields.keys() >= NEEDED
        if inside or UNUSUAL & fields.keys() or fields.get("model_type") == "gemma4_text":
            return True
        heads = fields["num_attention_heads"]
        sizes = heads if (kv := fields.get("num_key_value_heads")) is None else kv, fields["hidden_size"] // heads
        layout = _layout(config, pool, fields["num_hidden_layers"], sizes[0], fields.get("head_dim") or sizes[1])
        length = config.model.max_model_len
        return bool(pool.kv_memory < layout.blocks_for(1 if length == "auto" else length) * layout.block_bytes)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, ZeroDivisionError):
        return False  # an unusual config.json, which the worker reads by its own rules


def _layout(config: ClusterConfig, pool: PoolConfig, layers: int, heads: int, head_dim: int, *tensors: str) -> KVLayout:
    """Return the layout with the smallest dtype that the config allows. `auto` may become bfloat16."""
    model, block = config.model, BLOCK if pool.block_size == "auto" else pool.block_size
    dtype = model.kv_dtype if model.kv_dtype != "auto" else model.dtype
    return KVLayout(layers, heads, head_dim, block, "bfloat16" if dtype == "auto" else dtype, tensors or ("k", "v"))


def _check(config: ClusterConfig, role: Role, pool: PoolConfig, folder: Path) -> None:
    import torch

    from baton.engine.kv_cache import size_kv
    from baton.engine.models.config import read_config
    from baton.engine.tp.sharding import divided
    from baton.worker.engine_factory import served_by
    from baton.worker.settings import from_config

    settings = from_config(config, role, "check")
    if served_by(settings):
        return  # transformers has its own rules
    model, ranks, length = read_config(folder), pool.tensor_parallel, config.model.max_model_len
    layout = _layout(config, pool, sum(model.spec.has_kv), model.kv_heads, model.cache_dim, *model.kv_tensors)
    if ranks > 1:
        divided(model, ranks, f"{role.value}.tensor_parallel", config.model.quantize)
    size_kv(
        replace(layout, state_size=model.spec.state_size),
        kv_memory=pool.kv_memory,
        max_model_len=length,
        model_max_len=2 if length == "auto" else max(length, 2),
        device=torch.device("cpu"),
        ranks=ranks,
        key=f"{role.value}.kv_memory",
        sequences=settings.max_running,
        deterministic=True,  # as the worker, unless its check finds bits that vary
    )
