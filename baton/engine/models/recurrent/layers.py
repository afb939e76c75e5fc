"""The layer of each kind."""

from __future__ import annotations

from typing import assert_never

from baton.engine.models.llama import Parts
from baton.engine.models.recurrent.conv import ShortConv
from baton.engine.models.recurrent.gated_delta import GatedDelta
from baton.engine.models.recurrent.mamba import Mamba
from baton.engine.models.recurrent.spec import GatedDeltaSpec, MambaSpec, RecurrentSpec, ShortConvSpec


def recurrent_layer(
    spec: RecurrentSpec, parts: Parts, name: str, hidden: int, offset: int
) -> ShortConv | GatedDelta | Mamba:
    """Return the layer with the state from number `offset` of a sequence's row on. `name` is its tensors' prefix."""
    match spec:
        case ShortConvSpec():
            return ShortConv(spec, parts, name, hidden, offset)
        case GatedDeltaSpec():
            return GatedDelta(spec, parts, name, hidden, offset)
        case MambaSpec():
            return Mamba(spec, parts, name, hidden, offset)
    assert_never(spec)
