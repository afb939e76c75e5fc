"""Sweeps of frame sizes, slots, and the bytes below which KV is held back.

Each setting has its own lane, and each round measures every lane.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.lib.transfer_exposure import SPARE_TOKENS, prompt_of
from benchmarks.lib.transfer_handoffs import best
from benchmarks.lib.transfer_measure import DEFAULTS, GPU_DEVICES, START_S, ask, schedule, token_bytes

if TYPE_CHECKING:
    from benchmarks.lib.transfer_figures import Prompt
    from benchmarks.lib.transfer_measure import Plan, Results, Where

KIB, MIB = 1 << 10, 1 << 20
FRAMES = tuple(size * KIB for size in (128, 256, 512, 1024, 2048, 4096, 8192))
CREDITS = (1, 2, 3, 4, 6, 8)
COALESCE = tuple(size * KIB for size in (0, 64, 256, 1024, 4096))
SIZES = (4 * MIB, 64 * MIB)
PROMPTS = (16, 32, 64, 128, 512)
REPEATS = 5


class Setting(NamedTuple):
    """The varied settings of a lane."""

    transport: str
    frame_size: int = DEFAULTS.frame_size
    credits: int = DEFAULTS.credits
    coalesce_below: int = DEFAULTS.coalesce_below


def sweep_frames(plan: Plan, where: Where, results: Results) -> None:
    """Measure speed by frame size with the default slots, and by slots with the default frame size."""
    names = [name for name in plan.transports if name not in GPU_DEVICES]
    settings = [Setting(name, frame_size=size) for name in names for size in FRAMES]
    settings += [Setting(name, credits=slots) for name in names for slots in CREDITS if slots != DEFAULTS.credits]
    each = token_bytes(where.large)
    times: defaultdict[tuple[int, Setting], list[float]] = defaultdict(list)
    with where.child("transfer_push", where.large, max(SIZES) // each + 1) as push:
        push.start(START_S)
        lanes = {one: push.ask("open", START_S, settings=one._asdict())["lane"] for one in settings}
        for _, size, one in schedule(plan.rounds, SIZES, settings):
            answer = ask(push, "push", lane=lanes[one], tokens=size // each, repeats=REPEATS)
            times[size, one].append(best(answer))
    results.sweeps["Frame sizes and slots"] = [
        {
            "transport": one.transport,
            "frame, KiB": one.frame_size // KIB,
            "slots": one.credits,
            **{f"GB/s at {size // MIB} MiB": size / median(times[size, one]) / 1e9 for size in SIZES},
        }
        for one in settings
    ]


def sweep_coalescing(plan: Plan, where: Where, results: Results) -> None:
    """Measure short prompts on the engine by the least bytes of a frame."""
    names = [name for name in plan.transports if name not in GPU_DEVICES]
    settings = [Setting(name, coalesce_below=size) for name in names for size in COALESCE]
    found: defaultdict[tuple[int, Setting], list[Prompt]] = defaultdict(list)
    with where.child("transfer_prefill", where.large, max(PROMPTS) + SPARE_TOKENS) as child:
        child.start(START_S)
        lanes = {one: child.ask("open", START_S, settings=one._asdict())["lane"] for one in settings}
        for number, tokens, one in schedule(plan.prompt_rounds, PROMPTS, settings):
            answer = ask(child, "prompt", lane=lanes[one], tokens=tokens)
            found[tokens, one].append(prompt_of((one.transport, tokens, True, number), answer))
    results.sweeps["KV that is held back: until it is this much, or the prompt is computed"] = [
        {
            "transport": one.transport,
            "KiB": one.coalesce_below // KIB,
            "tokens": tokens,
            "frames": median(prompt.frames for prompt in prompts),
            "first token, ms": median(prompt.ttft_s for prompt in prompts) * 1e3,
            "left, ms": median(prompt.left_s for prompt in prompts) * 1e3,
        }
        for (tokens, one), prompts in found.items()
    ]
