"""The meaning of each field of an HTTP body. A field without a meaning here stops the generation."""

from __future__ import annotations

from collections.abc import Mapping

from baton.core import SAMPLING

_RANGES = {name: text for name, _, _, text in SAMPLING}
VALUES: Mapping[str, str] = {  # of the fields that a validator parses, which the schema does not show
    "prompt": "string or list",
    "stop": "string or list of string",
    "tool_choice": "string or mapping",
}
MEANINGS: Mapping[str, str] = {
    "model": "name of the served model; left out: the served one; another name is a 404",
    "prompt": "a string, token ids, or a list of up to 128 of either",
    "messages": "each has `role`, `content` (a string or text parts) and, for tools, `tool_calls` or `tool_call_id`",
    "max_tokens": "maximum new tokens; left out: up to `max_model_len` in a chat, 16 in a completion",
    "max_completion_tokens": "the same as `max_tokens`; if both are there, they must be equal",
    "temperature": f"{_RANGES['temperature']}; 0 means greedy; the default is 1",
    "top_p": f"{_RANGES['top_p']}; the default is 1",
    "n": "number of answers",
    "stream": "send chunks as they are generated, then `[DONE]`",
    "stream_options": "only with `stream`",
    "stream_options.include_usage": "send a last chunk with `usage`",
    "stream_options.continuous_usage_stats": "`usage` in each chunk (vLLM); only with `include_usage`",
    "stream_options.include_obfuscation": "accepted only as false",
    "stop": "a string or up to 16 strings that end the answer",
    "seed": "seed of the sampling noise, 64 bits; negative ones too",
    "presence_penalty": _RANGES["presence_penalty"],
    "frequency_penalty": _RANGES["frequency_penalty"],
    "logit_bias": "token id to a bias of -100 to 100",
    "user": "a label in the router's log, at most 128 characters",
    "logprobs": "in a completion the number of alternatives per token, at most 20; in a chat true or false",
    "top_logprobs": "number of alternatives per token, at most 20; only with `logprobs: true`",
    "best_of": "accepted only if it equals `n`",
    "response_format": "format of the answer's text; with `tools` only if a call is forced or excluded",
    "response_format.type": "`json_object`: any JSON object; `json_schema`: an object that fits the schema",
    "response_format.json_schema": "required with type `json_schema`",
    "response_format.json_schema.name": "accepted, without effect",
    "response_format.json_schema.description": "accepted, without effect",
    "response_format.json_schema.strict": "accepted; the schema is always enforced",
    "response_format.json_schema.schema": "the JSON schema, at most 65,536 bytes",
    "tools": "functions that the model may call, if its chat template supports tools",
    "tool_choice": "`none`, `auto`, `required`, or a function by name; the last two force a call",
    "parallel_tool_calls": "false: at most one call in an answer",
    "top_k": "number of most likely tokens to sample from; 0 or -1 means all (vLLM)",
    "min_p": f"minimum probability relative to the most likely token, {_RANGES['min_p']} (vLLM)",
    "min_tokens": "tokens before an end token or a stop string may end the answer (vLLM)",
    "ignore_eos": "continue after an end token (vLLM)",
    "repetition_penalty": f"{_RANGES['repetition_penalty']}; 1 means none (vLLM)",
    "stop_token_ids": "token ids that end the answer (vLLM)",
    "cache_salt": "the prefix cache is shared only between requests with equal salt (vLLM)",
    "priority": "-100 to 100; higher goes first (vLLM: lower)",
    "deterministic": "bit-exact results: see [Determinism](../determinism.md)",
    "thoughts": "send the thoughts of a model that thinks; other models reject it",
    "think_while_decoding": "continue to think during the answer; left out: as the cluster file sets it",
}
