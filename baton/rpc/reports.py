"""What workers report, between protobuf and our types; see `baton.rpc.convert`."""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from operator import attrgetter

from baton.load import BlockCounts, Channel, Load, Pace
from baton.rpc.convert import require
from baton.rpc.v1 import common_pb2 as common

_NESTED_LOAD = {"blocks", "channels", "prefill_pace", "decode_pace", "joint_pace", "beside_pace"}
_NO_PACE = Pace()
_LOAD = tuple(field.name for field in fields(Load) if field.name not in _NESTED_LOAD)
_PACE, _COUNTS = (tuple(field.name for field in fields(kind)) for kind in (Pace, BlockCounts))
_LOAD_OF, _PACE_OF, _COUNTS_OF = attrgetter(*_LOAD), attrgetter(*_PACE), attrgetter(*_COUNTS)


def counts_to_pb(value: BlockCounts) -> common.BlockCounts:
    """Names are the same on both sides."""
    return common.BlockCounts(**dict(zip(_COUNTS, _COUNTS_OF(value), strict=True)))


def counts_from_pb(message: common.BlockCounts) -> BlockCounts:
    """Raises InvalidRequest when the states do not add up to the total: the sender's ledger is broken."""
    counts = BlockCounts(
        message.total, message.free, message.reserved, message.owned, message.cached, message.quarantined
    )
    states = counts.free + counts.reserved + counts.owned + counts.cached + counts.quarantined
    require(states == counts.total, "load.blocks", f"states add up to {states}, not to the total {counts.total}")
    return counts


def load_to_pb(value: Load) -> common.Load:
    """Names are the same on both sides. With every step: `asdict` would take longer than all the rest of it."""
    return common.Load(
        blocks=counts_to_pb(value.blocks),
        channels=[common.Channel(**asdict(channel)) for channel in value.channels],
        prefill_pace=_pace_to_pb(value.prefill_pace),
        decode_pace=_pace_to_pb(value.decode_pace),
        joint_pace=_pace_to_pb(value.joint_pace),
        beside_pace=_pace_to_pb(value.beside_pace),
        **dict(zip(_LOAD, _LOAD_OF(value), strict=True)),
    )


def _pace_to_pb(value: Pace) -> common.Pace | None:
    """None: no such step yet."""
    return common.Pace(**dict(zip(_PACE, _PACE_OF(value), strict=True))) if value != _NO_PACE else None


def load_from_pb(message: common.Load) -> Load:
    """Raises InvalidRequest when the block ledger does not add up, or time does not."""
    given = {field.name: value for field, value in message.ListFields() if field.name not in _NESTED_LOAD}
    return Load(
        blocks=counts_from_pb(message.blocks),
        channels=tuple(Channel(c.peer, c.transport, c.bytes_per_s) for c in message.channels),
        prefill_pace=_pace(message.prefill_pace, "load.prefill_pace"),
        decode_pace=_pace(message.decode_pace, "load.decode_pace"),
        joint_pace=_pace(message.joint_pace, "load.joint_pace"),
        beside_pace=_pace(message.beside_pace, "load.beside_pace"),
        **given,
    )


def _pace(message: common.Pace, field: str) -> Pace:
    """Not set: no such step yet. `field` is what the caller calls it."""
    require(0 <= message.seconds < math.inf, f"{field}.seconds", f"must be 0 or more, got {message.seconds}")
    return Pace(message.steps, message.tokens, message.context, message.seconds)
