"""All labels of all metrics, and what their values may be. What is not listed is not exported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from baton import errors
from baton.core import FinishReason, Role
from baton.errors import BatonError
from baton.stages import Stage

OUTCOMES = ("finished", "cancelled", "failed", "refused")
RECOVERIES = ("preempted", "no_room", "kv_dropped", "prefill_lost", "decode_lost", "not_there")
TRANSPORTS = ("nccl", "gloo", "shm", "cuda_ipc", "grpc", "memory", "unknown")
BLOCK_STATES = ("free", "owned", "cached", "reserved", "quarantined")
STEP_KINDS = ("prefill", "decode", "mixed")
HANDOFFS = ("pushed", "failed", "aborted", "committed", "fenced")
SLOT_STATES = ("starting", "ready", "turning", "draining", "failed")
DECISIONS = ("plan", "start", "turn", "drain", "end", "replace", "give_up")
STAGES = tuple(stage.value for stage in Stage)
FINISHES = tuple(reason.value for reason in FinishReason)
SUCCESS = {"eos": "stop", "stop_token": "stop", "stop_string": "stop", "length": "length"}  # as vLLM calls them


def _classes(kind: type[BatonError]) -> Iterable[str]:
    yield kind.__name__
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from _classes(below)


REFUSALS = tuple(sorted(set(_classes(BatonError))))

# Values, or, of those that a cluster has as many of as it has workers or versions, what they are.
Values = tuple[str, ...] | str
# By name, those that mean the same in every metric.
LABELS: Mapping[str, Values] = {
    "cluster": "the cluster file's `name`",
    "version": "Baton's version",
    "met": ("true", "false"),
    "stage": STAGES,
    "role": tuple(role.value for role in Role),
    "transport": TRANSPORTS,
    "direction": ("sent", "received"),
    "worker": "a worker's id",
    "peer": "a worker's id",
    "model": "the name of the model that is served",
    "model_name": "the name of the model that is served",
    "fingerprint": "the first 12 digits of the fingerprint of the model that is served",
    "engine": ("0",),
    "finished_reason": tuple(dict.fromkeys(SUCCESS.values())),
    "block_size": "tokens of a block",
    "num_gpu_blocks": "blocks of a worker, on a GPU or not",
    "le": "a bucket's bound",
}
# And by metric, without the suffix of its samples, the labels that mean something else in another one.
OF_METRIC: Mapping[str, Mapping[str, Values]] = {
    "baton_requests": {"outcome": OUTCOMES},
    "baton_deterministic_requests": {"outcome": OUTCOMES},
    "baton_handoffs": {"outcome": HANDOFFS},
    "baton_refusals": {"reason": REFUSALS},
    "baton_recoveries": {"reason": RECOVERIES},
    "baton_finished_choices": {"reason": FINISHES},
    "baton_kv_blocks": {"state": BLOCK_STATES},
    "baton_slots": {"state": SLOT_STATES},
    "baton_step_seconds": {"kind": STEP_KINDS},
    "baton_computed_tokens": {"kind": ("prefill", "decode")},
    "baton_decisions": {"kind": DECISIONS},
}
_SUFFIX = re.compile(r"_(total|created|bucket|sum|count|info)$")


def values(metric: str, label: str) -> Values:
    """What `label` may be in `metric`, which is named as a whole or by one of its samples. Raises KeyError if none."""
    own = OF_METRIC.get(_SUFFIX.sub("", metric), {})
    return own[label] if label in own else LABELS[label]


def of(value: str, allowed: tuple[str, ...], other: str) -> str:
    """`value` if it is one that a label may have, else `other`: what peers say may be anything."""
    return value if value in allowed else other
