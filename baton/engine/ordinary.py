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
    from baton.engine.thoughts import Thoughts


class Drawn(NamedTuple):
    """What comes next in a request; `final`: unless it is a candidate of a deterministic one."""

    request: Request
    sampled: Sampled
    final: bool


class OrdinaryForwards:
    """Builds, computes and evaluates them, for one engine. `thoughts`: of a model that thinks."""

    def __init__(self, inputs: Inputs, thoughts: Thoughts | None = None) -> None:
        self._inputs, self._thoughts, self._sampler = inputs, thoughts, Sampler()

    @torch.inference_mode()
    def compute(
        self,
        part: Part,
        requests: Sequence[Request],
        backend: ModelBackend,
        kv: KVCache,
        on_layer: Callable[[list[Work], int], None] | None,
    ) -> list[Drawn]:
        """Run the model; a draw for each sequence of which all known tokens are computed then. Work of which a thought
        takes something back has a smaller `count` afterwards.
        """
        told = partial(on_layer, part.work) if on_layer is not None else None
        thinking = None if self._thoughts is None else self._thoughts.inject(part.work)
        tokens = [request.tokens for request in requests]
        batch = self._inputs.build(part.work, tokens, told, fixed=part.exact, thinking=thinking)
        logits = backend.forward(batch, kv)
        if self._thoughts is not None and thinking is not None:
            wanted = [item for item in part.work if item.completes]
            self._thoughts.settle(part.work, thinking)
            logits = logits[[item.completes for item in wanted]]
        ready = [request for request, item in zip(requests, part.work, strict=True) if item.completes]
        draws = self._sampler.sample(logits, [request.row for request in ready]) if ready else []
        return [Drawn(*each, _is_final(each[0], part)) for each in zip(ready, draws, strict=True)]


def _is_final(request: Request, part: Part) -> bool:
    return request.draft is None or (part.exact and request.sequence.confirmed)
