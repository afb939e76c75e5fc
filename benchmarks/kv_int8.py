"""KV in int8 against KV in the model's dtype: bytes in the cache and in a handoff, equal answers, and speed.

    python benchmarks/kv_int8.py --quick      two rounds
    python benchmarks/kv_int8.py              five rounds

Bytes and speed are those of a 125 M model in bfloat16. Equal answers are those of models/demo to the 200 prompts of
models/heldout.jsonl, in its own dtype and in bfloat16. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/kv_int8.py`

import torch

from baton.client import Client
from baton.core import HandoffId, Sampling, SequenceSpec
from baton.engine.engine import Engine
from baton.engine.kernels.cpu.compiler import chosen_level
from baton.engine.kernels.kv_levels import KVDtype
from baton.engine.models.loading import load_model
from baton.tokenizer import load_tokenizer
from benchmarks.lib.cluster import cluster
from benchmarks.lib.models import make_model
from benchmarks.lib.points import Point
from benchmarks.lib.protocol import ROOT, Setup
from benchmarks.lib.report import finish, markdown
from benchmarks.lib.subject import Subject

KINDS: tuple[KVDtype, ...] = ("auto", "int8")
POINTS = tuple(map(Point.parse, ("P512", "B1@3584", "B4@1792")))
STEPS, REPEATS = 8, 3  # decode steps and prompts of a measurement
DEMO, PROMPTS = ROOT / "models" / "demo", ROOT / "models" / "heldout.jsonl"
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


def answers(dtype: str, kind: KVDtype) -> list[list[int]]:
    """Return the greedy tokens of the demo model for each held-out prompt."""
    tokenizer = load_tokenizer(DEMO)
    engine = Engine(load_model(DEMO, dtype=dtype, kv_dtype=kind), tokenizer, total_blocks=4096)
    found = [list[int]() for _ in PROMPTS.read_text().splitlines()]
    for number, line in enumerate(PROMPTS.read_text().splitlines()):
        prompt = tuple(tokenizer.encode(json.loads(line)["prompt"]))
        engine.submit(HandoffId(str(number), 0), SequenceSpec(prompt, Sampling(max_tokens=32, temperature=0.0)))
    while engine.has_work():
        for output in engine.step().outputs:
            found[int(output.key.request_id)] += [token.token_id for token in output.tokens]
    return found


def equal(dtype: str) -> int:
    """Return how many of the prompts have equal answers with both kinds of KV."""
    return sum(left == right for left, right in zip(*(answers(dtype, kind) for kind in KINDS), strict=True))


def sent(model: Path, kind: KVDtype) -> int:
    """Return the bytes of KV that a handoff between two processes moves."""
    options = f"model.path={model}", "model.dtype=bfloat16", f"model.kv_dtype={kind}", "model.max_model_len=auto"
    memory = "prefill.kv_memory=64MiB", "decode.kv_memory=64MiB", "router.local_prefill=never"
    with cluster("kv-int8", *options, *memory) as state, Client(state.grpc) as client:
        return client.generate(list(range(3, 3 + SENT)), max_tokens=2, temperature=0).placement.kv_bytes


def main(argv: list[str]) -> None:
    """Measure and print."""
    home = Path(os.environ.get("BATON_HOME") or Path.home() / ".baton").expanduser()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--tiny", action="store_true", help="a toy model: to try the program, not to measure")
    parser.add_argument("--rounds", type=int, help="turns of both kinds (5)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=home / "bench", help="folder for models")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/measurements/kv_int8.md")
    options = parser.parse_args(argv)
    load = os.getloadavg()[0]
    torch.set_num_threads(options.threads)
    model = make_model(options.cache.absolute(), "M", "bf16", tiny=options.tiny)
    layouts = [load_model(model, kv_dtype=kind).layout for kind in KINDS]
    cached = [float(layout.layers * layout.layer_token_bytes) for layout in layouts]
    moved = [float(sent(model, kind)) for kind in KINDS]
    rates = speeds(model, options.rounds or (2 if options.quick or options.tiny else 5))
    rows = {"bytes of a token in the cache": cached, f"bytes moved for {SENT} tokens": moved}
    for number, point in enumerate(POINTS):
        rows[f"{point} tokens/s"] = [rates[kind][number] for kind in KINDS]
    same = {f"equal answers, demo in {dtype}": float(equal(dtype)) for dtype in ("float32", "bfloat16")}
    ratios = {name: after / before for name, (before, after) in rows.items()}
    lines = [[name, *(f"{value:.0f}" for value in rows[name]), f"{ratios[name]:.3f}"] for name in rows]
    shown = markdown(["", "KV in bfloat16", "KV in int8", "ratio"], lines)
    shown += "\n\n" + "; ".join(f"{name}: {count:.0f} of 200" for name, count in same.items())
    shown = f"level {chosen_level()}, {options.threads} threads, model {model.name}\n\n{shown}"
    finish("kv_int8", argv, load, shown, ratios, same, write_docs=options.write_docs)


if __name__ == "__main__":
    main(sys.argv[1:])
