"""Architectures of GGUF files, by `general.architecture`: which config.json they mean, and the names of tensors.

Source: the converters of llama.cpp (github.com/ggml-org/llama.cpp, `conversion/`), whose changes are undone here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
EXPERTS = {"ffn_gate_exps": "mlp.experts.gate_up_proj", "ffn_down_exps": "mlp.experts.down_proj"}
GATES, UPS = "ffn_gate_exps", "ffn_up_exps"  # both are parts of one tensor


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row of the table. `paired` rows of q and k are in the order of interleaved rotations. The weights of norms have
    1 added if `plus_one`. `parts` are names of tensors of a layer that differ from `PARTS`. `keys` are further keys of
    config.json, by their name in the metadata after `<architecture>.`; `fixed` ones have a value.
    """

    model_class: str
    model_type: str
    eps: str = "rms_norm_eps"
    paired: bool = False
    plus_one: bool = False
    partial: bool = False  # a share of dimensions may rotate
    parts: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)

    def wide_name(self, stored: str) -> str | None:
        """Return the name in a checkpoint of the Hub, or None for a tensor that is read with another or not at all."""
        stem, _, end = stored.rpartition(".")
        if stem in WHOLE:
            return f"{WHOLE[stem]}.{end}"
        block, _, rest = stem.partition(".")
        number, _, part = rest.partition(".")
        if block != "blk" or not number.isdigit():
            return None
        layer = f"model.layers.{int(number)}"
        if part in EXPERTS:
            return f"{layer}.{EXPERTS[part]}"
        name = self.parts.get(part, PARTS.get(part))
        return None if name is None else f"{layer}.{name}.{end}"


_AROUND = {**AFTER, "ffn_norm": "pre_feedforward_layernorm"}
_SCALED = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", paired=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", keys={"expert_feed_forward_length": "moe_intermediate_size"},
        fixed={"norm_topk_prob": True},
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", "gemma2", plus_one=True, parts=_AROUND,
        keys={
            "attention.sliding_window": "sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", "gemma3_text", plus_one=True, parts=_AROUND,
        keys={
            "rope.freq_base_swa": "rope_local_base_freq", "final_logit_softcapping": "final_logit_softcapping",
        },
    ),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", partial=True, parts={"ffn_up": "mlp.gate_up_proj"}),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM", "starcoder2", eps="norm_epsilon",
        parts={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    "stablelm": Architecture("StableLmForCausalLM", "stablelm", eps="layer_norm_eps", partial=True),
    "nemotron": Architecture("NemotronForCausalLM", "nemotron", eps="norm_eps", partial=True, plus_one=True),
    "granite": Architecture("GraniteForCausalLM", "granite", paired=True, keys=_SCALED),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", paired=True),
    "arcee": Architecture("ArceeForCausalLM", "arcee", paired=True),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", parts=AFTER),
    "command-r": Architecture(
        "CohereForCausalLM", "cohere", eps="layer_norm_eps", keys={"logit_scale": "logit_scale"}
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM", "cohere2", eps="layer_norm_eps", keys={"logit_scale": "logit_scale"}
    ),
}  # fmt: skip
