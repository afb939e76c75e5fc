"""KV in int8 against KV in the model's dtype: bytes in the cache and in a handoff, equal answers, and speed.

    python benchmarks/kv_int8.py --quick      two rounds
    python benchmarks/kv_int8.py              five rounds

Bytes and speed are those of a 125 M model in bfloat16. Equal answers are those of models/demo to the 200 prompts of
models/heldout.jsonl, in its own dtype and in bfloat16. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/kv_int8.py`

import torch

from baton.client import Client
from baton.engine.kernels.cpu.compiler import level_here
from baton.engine.kernels.kv_levels import KVDtype
from baton.engine.models.loading import load_model
from benchmarks.lib.cluster import cluster
from benchmarks.lib.models import make_model
from benchmarks.lib.points import Point
from benchmarks.lib.protocol import Setup
from benchmarks.lib.quality import DEMO, answers
from benchmarks.lib.report import finish, markdown
from benchmarks.lib.subject import Subject
from benchmarks.lib.turns import number_of_turns, turns_parser

KINDS: tuple[KVDtype, ...] = ("auto", "int8")
POINTS = tuple(map(Point.parse, ("P512", "B1@3584", "B4@1792")))
STEPS, REPEATS = 8, 3  # decode steps and prompts of a measurement
SENT = 300  # tokens of the prompt that is handed over


def speeds(model: Path, rounds: int) -> dict[KVDtype, list[float]]:
    """Return median tokens/s of the points, measured in turns."""
    setup = Setup(str(model), "bf16", torch.get_num_threads(), kv_tokens=8192, cache="")
    subjects = {kind: Subject(setup, kv_dtype=kind) for kind in KINDS}
    times: dict[tuple[KVDtype, Point], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for point, kind in product(POINTS, KINDS):
            if point.batch:
                times[kind, point] += subjects[kind].decode(point.batch, point.tokens, STEPS)["seconds"]
            else:
                times[kind, point] += subjects[kind].prefill(point.tokens, REPEATS)["seconds"]
    return {kind: [point.produced / median(times[kind, point]) for point in POINTS] for kind in KINDS}


def equal(dtype: str) -> int:
    """Return how many of the prompts have equal answers with both kinds of KV."""
    both = [answers(load_model(DEMO, dtype=dtype, kv_dtype=kind)) for kind in KINDS]
    return sum(map(list.__eq__, *both))


def sent(model: Path, kind: KVDtype) -> int:
    """Return the bytes of KV that a handoff between two processes moves."""
    options = f"model.path={model}", "model.dtype=bfloat16", f"model.kv_dtype={kind}", "model.max_model_len=auto"
    memory = "prefill.kv_memory=64MiB", "decode.kv_memory=64MiB", "router.local_prefill=never"
    with cluster("kv-int8", *options, *memory) as state, Client(state.grpc) as client:
        return client.generate(list(range(3, 3 + SENT)), max_tokens=2, temperature=0).placement.kv_bytes


def main(argv: list[str]) -> None:
    """Measure and print."""
    options = turns_parser(__doc__, "kv_int8").parse_args(argv)
    load = os.getloadavg()[0]
    torch.set_num_threads(options.threads)
    model = make_model(options.cache.absolute(), "M", "bf16", tiny=options.tiny)
    layouts = [load_model(model, kv_dtype=kind).layout for kind in KINDS]
    cached = [float(layout.layers * layout.layer_token_bytes) for layout in layouts]
    moved = [float(sent(model, kind)) for kind in KINDS]
    rates = speeds(model, number_of_turns(options))
    rows = {"bytes of a token in the cache": cached, f"bytes moved for {SENT} tokens": moved}
    for number, point in enumerate(POINTS):
        rows[f"{point} tokens/s"] = [rates[kind][number] for kind in KINDS]
    same = {f"equal answers, demo in {dtype}": float(equal(dtype)) for dtype in ("float32", "bfloat16")}
    ratios = {name: after / before for name, (before, after) in rows.items()}
    lines = [[name, *(f"{value:.0f}" for value in rows[name]), f"{ratios[name]:.3f}"] for name in rows]
    shown = markdown(["", "KV in bfloat16", "KV in int8", "ratio"], lines)
    shown += "\n\n" + "; ".join(f"{name}: {count:.0f} of 200" for name, count in same.items())
    shown = f"level {level_here()}, {options.threads} threads, model {model.name}\n\n{shown}"
    finish("kv_int8", argv, load, shown, ratios, same, write_docs=options.write_docs)


if __name__ == "__main__":
    main(sys.argv[1:])
