"""Handoffs of computed KV, compared with bare transfers of the same bytes, round by round."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from benchmarks.lib.protocol import ChildFailed
from benchmarks.lib.transfer_figures import OURS, RAW, VERIFIED, WHOLE, Moved, Way
from benchmarks.lib.transfer_measure import DEFAULTS, GPU_DEVICES, START_S, ask, schedule, token_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from benchmarks.lib.protocol import Answer, Child
    from benchmarks.lib.transfer_measure import Plan, Results, Where

MEMORY = "memory"  # "transport" of a copy within one process, for comparison
REPEATED_BYTES = 128 << 20  # small sizes repeat until about this many bytes have moved in a round
MOST = 12  # repetitions
LEAST_OF_SMALL = 50
RING = {"frame": DEFAULTS.frame_size, "slots": DEFAULTS.credits}
RAW_COMMANDS: dict[str, tuple[str, dict[str, object]]] = {
    "gloo": ("pair", {"kind": "gloo", **RING}),
    "shm": ("shm", {**RING}),
    "nixl": ("nixl", {**RING}),
    "nccl": ("pair", {"kind": "nccl", **RING}),
    "cuda_ipc": ("device_copy", {}),
    MEMORY: ("copy", {}),
}


def measure_sizes(plan: Plan, where: Where, results: Results) -> None:
    """Measure each size at the 1.1 B shape, over every transport, with and without the digest of the whole KV."""
    ways = [Way(name, kind) for name in plan.transports for kind in (RAW, OURS, VERIFIED)] + [Way(MEMORY, RAW)]
    each = token_bytes(where.large)
    beside = Beside(where.large, {size: -(-size // each) for size in plan.sizes}, ways)
    beside.run(plan.rounds, where, results)


def measure_small(plan: Plan, where: Where, results: Results) -> None:
    """Measure the whole handoff of a short prompt's KV at the 15 M shape, from its offer on."""
    ways = [Way(name, kind) for name in plan.transports for kind in (RAW, WHOLE)]
    nominal = plan.small * token_bytes(where.small)
    Beside(where.small, {nominal: plan.small}, ways, least=LEAST_OF_SMALL).run(plan.rounds, where, results)


class Beside:
    """All `ways` side by side, at each of `sizes`: nominal bytes to tokens."""

    def __init__(self, model: Path, sizes: Mapping[int, int], ways: Sequence[Way], least: int = 1) -> None:
        self._model, self._sizes, self._ways, self._least = model, sizes, ways, least

    def run(self, rounds: int, where: Where, results: Results) -> None:
        """Measure into `results`."""
        room = max(self._sizes.values()) + 1
        with (
            where.child("transfer_raw", self._model, room) as raw,
            where.child("transfer_push", self._model, room) as push,
        ):
            raw.start(START_S)
            push.start(START_S)
            lanes = open_lanes(push, self._ways, results)
            ways = [way for way in self._ways if way.kind == RAW or way in lanes]
            for number, nominal, way in schedule(rounds, self._sizes, ways):
                self._one(raw if way.kind == RAW else push, way, lanes.get(way), nominal, number, results)

    def _one(self, child: Child, way: Way, lane: int | None, nominal: int, number: int, results: Results) -> None:
        if not child.alive:
            return
        tokens = self._sizes[nominal]
        nbytes = tokens * token_bytes(self._model)
        repeats = max(self._least, min(MOST, REPEATED_BYTES // nbytes))
        try:
            if lane is None:
                command, arguments = RAW_COMMANDS[way.transport]
                answer = ask(child, command, nbytes=nbytes, repeats=repeats, **arguments)
            else:
                whole = way.kind == WHOLE
                answer = ask(child, "push", lane=lane, tokens=tokens, repeats=repeats, from_begin=whole)
        except ChildFailed as error:
            results.drop(str(way), error)
            return
        results.moved.append(Moved(way, nominal, nbytes, number, best(answer)))
        results.raw.append({"way": str(way), "nominal": nominal, "nbytes": nbytes, "round": number, **answer})


def best(answer: Answer) -> float:
    """Return the median of the seconds, or of the fastest of several ways."""
    ways: dict[str, list[float]] = answer.get("ways") or {"": answer["seconds"]}
    return min(median(times) for times in ways.values())


def open_lanes(push: Child, ways: Sequence[Way], results: Results) -> dict[Way, int]:
    """Return the lane of each way except raw ones. Ways unavailable on this machine are recorded as missing."""
    lanes: dict[Way, int] = {}
    for way in ways:
        device, peer = GPU_DEVICES.get(way.transport, ("cpu", "cpu"))
        settings = {"transport": way.transport, "verify_kv": way.kind == VERIFIED}
        if way.kind != RAW:
            try:
                opened = push.ask("open", START_S, settings=settings, device=device, peer_device=peer)
            except ChildFailed as error:
                results.drop(str(way), error)
            else:
                lanes[way] = opened["lane"]
    return lanes
