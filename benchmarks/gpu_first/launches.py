"""Step 7: launches, time and idle share of a decode step, by rows and by kind of sampling."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from baton.core import HandoffId, Sampling, SequenceSpec
from baton.engine.engine import Engine
from baton.engine.kernels.gpu.cuda_graphs import with_graphs
from baton.tokenizer import OracleTokenizer
from benchmarks.gpu_first.at import At, Outcome, require
from benchmarks.lib.random_weights import random_model, settings_of
from benchmarks.lib.shapes import SIZES, TINY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.engine.models.loading import TransformerBackend

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
}
# Calls of the CUDA runtime and driver that start work on the device.
STARTS = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
GRAPH_LAUNCHES, MOST_OTHERS = 1, 14  # of a step: at most 8 small copies, and 6 launches of sampling
WARM, COUNTED, TIMED = 3, 4, 20
STEPS = WARM + COUNTED + TIMED + 10  # of a sequence behind its prompt
CHUNK = 4096


class Step(NamedTuple):
    """A decode step: launches of graphs and of anything else, milliseconds, and the share without GPU work."""

    graphs: float
    others: float
    milliseconds: float
    idle: float | None

    def figures(self) -> dict[str, float | None]:
        """Return the numbers, rounded."""
        idle = None if self.idle is None else round(self.idle, 3)
        return {"graphs": self.graphs, "others": self.others, "ms": round(self.milliseconds, 3), "idle": idle}


def run(at: At) -> Outcome:
    """Measure all kinds and rows, then one long row among short ones."""
    shape, longest = at.size(SIZES["L"], TINY["S"]), at.size(32_768, 300)
    model = random_model(
        settings_of(shape, longest + 1024), device=at.device, dtype=at.size("bfloat16", "float32"), block_size=16
    )
    brief, found = at.size(64, 8), {}
    for rows in at.size((1, 16, 64, 256), (1, 4)):
        engine = engine_of(model, [brief] * rows, at)
        for kind, options in KINDS.items():
            found[f"{kind}, {rows} rows"] = measured(engine, [brief] * rows, options, at)
    others = [brief] * at.size(63, 3)
    engine = engine_of(model, [longest, *others], at)
    short, mixed = (measured(engine, [length, *others], KINDS["greedy"], at) for length in (brief, longest))
    figures: dict[str, Any] = {name: step.figures() for name, step in found.items()}
    ratio = mixed.milliseconds / short.milliseconds
    figures |= {"one long row": mixed.figures(), "without it": short.figures(), "long_row_costs": round(ratio, 2)}
    if at.device.type == "cuda":
        wrong = [name for name, step in found.items() if step.graphs > GRAPH_LAUNCHES or step.others > MOST_OTHERS]
        require(not wrong, f"more than 1 graph and {MOST_OTHERS} other launches: {', '.join(wrong)}; {figures}")
    name, step = next(reversed(found.items()))
    text = f"{name}: {step.graphs:.0f} graph and {step.others:.0f} other launches, {step.milliseconds:.2f} ms"
    idle = "" if step.idle is None else f", idle {step.idle:.0%}"
    return Outcome(f"{text}{idle}; one row of {longest} tokens makes a step {ratio:.2f} times as long", figures)


def engine_of(model: TransformerBackend, lengths: Sequence[int], at: At) -> Engine:
    """Return an engine with room for prompts of these lengths, with decode graphs on a GPU."""
    blocks = sum(-(-(length + STEPS + len(lengths)) // model.layout.block_size) + 1 for length in lengths)
    sizes: dict[str, Any] = {"total_blocks": 2 * blocks, "max_batched_tokens": CHUNK, "max_running": len(lengths)}
    longest = max(lengths) + STEPS + len(lengths) + 1
    engine = Engine(model, OracleTokenizer(), prefix_cache=False, max_model_len=longest, **sizes)
    engine.backend = with_graphs(model, engine.kv, engine.inputs.widest())
    require(engine.backend is not model or at.dry, "the decode graphs cannot be captured")
    return engine


def measured(engine: Engine, lengths: Sequence[int], options: dict[str, Any], at: At) -> Step:
    """Return the mean of decode steps of sequences with prompts of these lengths."""
    keys = decoding(engine, lengths, options)
    timed, began = at.size(TIMED, 4), time.perf_counter()
    for _ in range(timed):
        _checked_step(engine)
    _wait(at)
    milliseconds = (time.perf_counter() - began) * 1e3 / timed
    graphs, others, busy = profiled(engine, at)
    for key in keys:
        engine.release(key)
    return Step(graphs, others, milliseconds, None if at.dry else max(0.0, 1 - busy / milliseconds))


def decoding(engine: Engine, lengths: Sequence[int], options: dict[str, Any]) -> list[HandoffId]:
    """Submit sequences and run steps until all of them decode. Returns their keys."""
    keys = [HandoffId(f"row-{i}", 1) for i in range(len(lengths))]
    for i, (key, length) in enumerate(zip(keys, lengths, strict=True)):
        prompt = tuple((7 * i + n) % 250 for n in range(length))
        sampling = Sampling(max_tokens=STEPS + len(lengths), ignore_eos=True, seed=i, **options)
        engine.submit(key, SequenceSpec(prompt, sampling))
    while engine.load().waiting or engine.load().queued_tokens > len(lengths):
        _checked_step(engine)
    for _ in range(WARM):
        _checked_step(engine)
    require(engine.load().running == len(lengths), f"{engine.load().running} of {len(lengths)} sequences decode")
    return keys


def profiled(engine: Engine, at: At) -> tuple[float, float, float]:
    """Return the launches of graphs and of other work per step, and the milliseconds of work on the GPU.

    On a CPU, operations of torch stand for the launches.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (not at.dry)
    with profile(activities=activities) as record:
        for _ in range(COUNTED):
            _checked_step(engine)
        _wait(at)
    events = list(record.events() or [])
    starts = [event.name for event in events if event.name.startswith(("aten::",) if at.dry else STARTS)]
    graphs = sum(name.startswith("cudaGraphLaunch") for name in starts)
    busy = sum(each.time_range.elapsed_us() for each in events if each.device_type == DeviceType.CUDA)
    return graphs / COUNTED, (len(starts) - graphs) / COUNTED, busy / 1e3 / COUNTED


def _checked_step(engine: Engine) -> None:
    if failed := engine.step().failed:
        raise failed[0][1]


def _wait(at: At) -> None:
    if at.device.type == "cuda":
        torch.cuda.synchronize(at.device)
