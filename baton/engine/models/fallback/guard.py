"""Refusals by name: checkpoints and models that `transformers` would compute wrongly over Baton's KV.

Only models are served all of whose layers are causal attention through the interface. A layer with a state of its own
(linear attention, Mamba, a convolution) would begin anew with each chunk and mix the sequences of a batch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from baton.engine.models.families.common import DUAL_CHUNK, DUAL_CHUNK_LENGTH
from baton.engine.models.formats.select import declared_format
from baton.engine.models.json_fields import Fields
from baton.errors import BatonError, CheckpointError

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
OTHERS = ("vision_config", "audio_config", "encoder", "decoder", "thinking")  # sections of config.json
ENDINGS = ("ForCausalLM", "LMHeadModel", "GenerationDecoder")  # of the names of classes
STATEFUL = re.compile(
    r"SSM|(?i:mamba|rwkv|lstm|recurrent|retention|linear_?attention|delta_?(net|rule)|short_?conv|conv[123]d|lightning)"
)
LINEAR = frozenset({("transformers.pytorch_utils", "Conv1D")})  # a linear layer, whatever its name
EXPERTS = re.compile(r"expert|moe|sparse", re.IGNORECASE)
VARYING_ROPE = frozenset({"dynamic", "longrope"})  # frequencies depend on the longest sequence of the batch


@contextmanager
def foreign(subject: str, failed: str) -> Iterator[None]:
    """Turn errors of transformers into CheckpointError: an architecture can raise anything for an unexpected config."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{subject} {failed}: {error}") from error
    except (BatonError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise CheckpointError(f"{subject} {failed}: {type(error).__name__}: {error}") from error


def checked_config(fields: Fields, folder: str) -> PretrainedConfig:
    """Return the config that transformers reads. Raises CheckpointError with the key, before a model's code runs."""
    if (stored := declared_format(fields)) is not None:
        text = f"({stored.summary}): not supported for models that run in transformers; use the original checkpoint"
        raise fields.error("quantization_config", text)
    model_type = fields.text("model_type", "")
    if model_type not in CONFIG_MAPPING_NAMES:
        code = "; its own code (auto_map) is never run" if fields.has("auto_map") else ""
        name = next(iter(fields.texts("architectures")), "")
        raise fields.error(
            "architectures",
            f"{name!r} has no native family, and model_type {model_type!r} is not in transformers{code}",
        )
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise fields.error("model_type", f"{model_type!r} is no causal language model in transformers")
    for key in OTHERS:
        if fields.has(key):
            raise fields.error(key, "is not supported for models that run in transformers")
    if not all(name.endswith(ENDINGS) for name in fields.texts("architectures")):
        raise fields.error("architectures", f"{fields.texts('architectures')[0]!r} is no causal language model")
    with foreign(fields.where, "cannot be read"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if config.is_encoder_decoder or config.get_text_config() is not config:
        raise fields.error("model_type", f"{model_type!r} is not a decoder of text alone")
    kinds = set(config.to_dict().get("layer_types") or ()) - LAYER_TYPES
    if kinds:
        raise fields.error("layer_types", f"has {sorted(kinds)[0]}, which is not full or sliding attention")
    return config


def check_class(config: PretrainedConfig) -> None:
    """Raise CheckpointError if the model's class or one of its modules rules it out. No weights are needed."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with foreign(kind.__name__, "is not supported"):
        if not kind._can_set_attn_implementation():
            raise CheckpointError("it does not use the attention interface of transformers")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        if why := _stateful_module(model):
            raise CheckpointError(f"{why} keeps a state outside attention")
        if why := _counts_positions(model):
            raise CheckpointError(f"{why} counts positions by itself, which is wrong in a chunk")


def positions_limit(config: PretrainedConfig) -> int:
    """Return the number of positions that the model computes in any batch as if it was alone."""
    with foreign(config.model_type, "has no max_position_embeddings"):
        limit = int(config.max_position_embeddings)
    rope, dual = config.to_dict().get("rope_parameters") or {}, config.to_dict().get(DUAL_CHUNK)
    sections = [section for section in (rope, *rope.values()) if isinstance(section, dict)]
    varying = [section for section in sections if section.get("rope_type") in VARYING_ROPE]
    varying += [{"original_max_position_embeddings": DUAL_CHUNK_LENGTH} | dual] if isinstance(dual, dict) else []
    return min([limit, *(section.get("original_max_position_embeddings") or limit for section in varying)])


def _stateful_module(model: PreTrainedModel) -> str:
    """Return the first module that keeps a state outside attention, or ""."""
    for name, module in model.named_modules():
        kind = type(module)
        if (kind.__module__, kind.__name__) not in LINEAR and STATEFUL.search(kind.__name__):
            return name or kind.__name__
    return "the model" if model._is_stateful else ""


def _counts_positions(model: PreTrainedModel) -> str:
    """Return the first attention layer that makes positions from the number of its rows, or "". In Llama 4, this has an
    effect only after thousands of tokens, which a short check does not see.
    """
    kinds = {type(module) for module in model.modules() if type(module).__name__.endswith("Attention")}
    found = sorted(kind.__name__ for kind in kinds if "arange(" in inspect.getsource(kind.forward))
    return found[0] if found else ""


def attention_elsewhere(model: PreTrainedModel, called: Collection[nn.Module]) -> str:
    """Return the first attention layer that did not call the registered function, or ""."""
    for name, module in model.named_modules():
        parts = {id(part) for part in module.modules()}
        if type(module).__name__.endswith("Attention") and not parts & {id(each) for each in called}:
            return f"{name} ({type(module).__name__})"
    return ""


def has_experts(model: PreTrainedModel) -> bool:
    """Return whether rows are computed in groups that depend on the rest of the batch."""
    return any(EXPERTS.search(type(module).__name__) for module in model.modules())
