"""The forwards of the ordinary batch: prompt chunks and decode rows, and what is drawn from their logits."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from baton.engine.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.engine.backend import ModelBackend
    from baton.engine.exact import Part
    from baton.engine.inputs import Inputs
    from baton.engine.kv import KVCache
    from baton.engine.request import Request
    from baton.engine.sampler import Sampled
    from baton.engine.sequence import Work


class Drawn(NamedTuple):
    """What comes next in a request; `final`: unless it is a candidate of a deterministic one."""

    request: Request
    sampled: Sampled
    final: bool


class OrdinaryForwards:
    """Builds, computes and evaluates them, for one engine."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs, self._sampler = inputs, Sampler()

    @torch.inference_mode()
    def compute(
        self,
        part: Part,
        requests: Sequence[Request],
        backend: ModelBackend,
        kv: KVCache,
        on_layer: Callable[[list[Work], int], None] | None,
    ) -> list[Drawn]:
        """Run the model; a draw for each sequence of which all known tokens are computed then."""
        told = partial(on_layer, part.work) if on_layer is not None else None
        batch = self._inputs.build(part.work, [request.tokens for request in requests], told, fixed=part.exact)
        logits = backend.forward(batch, kv)
        ready = [request for request, item in zip(requests, part.work, strict=True) if item.completes]
        draws = self._sampler.sample(logits, [request.row for request in ready]) if ready else []
        return [Drawn(*each, _is_final(each[0], part)) for each in zip(ready, draws, strict=True)]


def _is_final(request: Request, part: Part) -> bool:
    return request.draft is None or (part.exact and request.sequence.confirmed)
