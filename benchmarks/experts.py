"""Speed of mixtures of experts against transformers, in one process and in turns.

    python benchmarks/experts.py --quick           a model of 210 M parameters, in about a minute
    python benchmarks/experts.py                   five rounds

The model is a Qwen3-MoE with random weights: 16 experts, 4 for each token. transformers runs its bare forward on a
cache that was filled by hand, and its experts' default implementation. The last line of stdout is one JSON object:
tokens/s of each point, and Baton's as ratios to those of transformers.
"""

from __future__ import annotations

import os
import shutil
import sys
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/experts.py`

import torch
import transformers

from baton.engine.kernels.cpu.compiler import level_here
from benchmarks.lib.models import DTYPES, make_model
from benchmarks.lib.points import Point
from benchmarks.lib.protocol import Setup
from benchmarks.lib.report import finish, markdown
from benchmarks.lib.subject import Subject
from benchmarks.lib.turns import number_of_turns, turns_parser
from benchmarks.peers.transformers_eager import Transformers

Times = dict[tuple[str, str, str], list[float]]  # by dtype, point and engine
POINTS = tuple(map(Point.parse, ("P128", "P512", "B1@128", "B4@128", "B16@128")))
STEPS = 8  # of a decode measurement
SHAPE: dict[str, Any] = {
    "hidden_size": 768, "moe_intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 12,
    "num_key_value_heads": 4, "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 2048,
    "vocab_size": 32_000, "max_position_embeddings": 4096, "tie_word_embeddings": False, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
TINY = SHAPE | {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 1024}


def made(cache: Path, dtype: str, *, tiny: bool) -> Path:
    """Return the folder of the model, made at the first call, with the tokenizer of the dense model."""
    folder = cache / "models" / f"{'tiny-' if tiny else ''}experts-{dtype}"
    if not folder.is_dir():
        torch.manual_seed(0)
        config = transformers.Qwen3MoeConfig(**(TINY if tiny else SHAPE))
        unfinished = folder.with_suffix(".unfinished")
        transformers.Qwen3MoeForCausalLM(config).to(DTYPES[dtype]).save_pretrained(unfinished)
        shutil.copy(make_model(cache, "M", dtype, tiny=tiny) / "tokenizer.json", unfinished)
        unfinished.rename(folder)
    return folder


def measured(engine: Subject | Transformers, point: Point) -> list[float]:
    """Return the seconds of one prompt, or of some decode steps."""
    found = engine.decode(point.batch, point.tokens, STEPS) if point.batch else engine.prefill(point.tokens, 1)
    seconds: list[float] = found["seconds"]
    return seconds


def table(times: Times, dtypes: tuple[str, ...]) -> tuple[str, dict[str, float | None], dict[str, float]]:
    """Return the table, Baton's ratios to transformers, and tokens/s."""
    rows, ratios, rates = list[list[str]](), dict[str, float | None](), dict[str, float]()
    for dtype in dtypes:
        for point in POINTS:
            found = {engine: times[dtype, str(point), engine] for engine in ("baton", "transformers")}
            speeds = {engine: point.produced / median(seconds) for engine, seconds in found.items()}
            spread = max((max(each) - min(each)) / median(each) for each in found.values())
            ratio = speeds["baton"] / speeds["transformers"]
            ratios[f"{dtype}_vs_transformers_{point}"] = ratio
            rates |= {f"{dtype} {point} {engine}": speed for engine, speed in speeds.items()}
            shown = (f"{speeds['baton']:.1f}", f"{speeds['transformers']:.1f}", f"{ratio:.2f}", f"{spread:.0%}")
            rows.append([dtype, str(point), *shown])
    return markdown(["dtype", "point", "Baton", "transformers", "ratio", "spread"], rows), ratios, rates


def main(argv: list[str]) -> None:
    """Measure and print."""
    options = turns_parser(__doc__, "experts").parse_args(argv)
    load, dtypes = os.getloadavg()[0], ("bf16", "fp32")
    torch.set_num_threads(options.threads)
    times: Times = {}
    for dtype in dtypes:
        model = made(options.cache.absolute(), dtype, tiny=options.tiny)
        setup = Setup(str(model), dtype, options.threads, kv_tokens=8192, cache="")
        engines: dict[str, Subject | Transformers] = {"baton": Subject(setup), "transformers": Transformers(setup)}
        for _, point, (name, engine) in product(range(number_of_turns(options) + 1), POINTS, engines.items()):
            times.setdefault((dtype, str(point), name), []).append(median(measured(engine, point)))
    text, ratios, rates = table({key: found[1:] for key, found in times.items()}, dtypes)  # the first turn warms up
    head = f"level {level_here()}, {options.threads} threads, transformers {transformers.__version__}, tokens/s"
    finish("experts", argv, load, f"{head}\n\n{text}", ratios, rates, write_docs=options.write_docs)


if __name__ == "__main__":
    main(sys.argv[1:])
