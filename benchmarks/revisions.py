"""Speed and logits of the engine at two git revisions, in turns.

    python benchmarks/revisions.py                  before the interpreter of decoder specs, and now
    python benchmarks/revisions.py --quick          two rounds, one dtype
    python benchmarks/revisions.py --before HEAD    a revision and itself: the noise of the machine
    python benchmarks/revisions.py --before A --after B --families llama,mixtral --dtype bf16

The families are those that existed before the interpreter, with random weights of 70 to 140 M parameters. Each
revision is unpacked into a temporary folder and measured in its own process by its own `benchmarks.lib.subject`, while
the other process is stopped. Each round starts both processes anew. In a round they take 40 short turns at each point:
a prompt, or a few decode steps of sequences that stay open. Each pair of turns gives one ratio, after / before.
*Equal logits* compares the bits of all logits of a greedy decode of four sequences.
The last line of stdout is one JSON object with the median ratios.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/revisions.py`

import torch
import transformers

from benchmarks.lib.models import DTYPES, make_model
from benchmarks.lib.points import Point
from benchmarks.lib.protocol import ROOT, Child, Setup
from benchmarks.lib.report import finish, markdown, write_section
from benchmarks.lib.turns import number_of_turns, turns_parser

BEFORE = "b95b4c95^"  # the last revision with code for each family
POINTS = tuple(map(Point.parse, ("P512", "B1@512", "B16@512")))
TURNS, WARM_TURNS, TINY_TURNS = 40, 2, 4  # of each point in a round
STEPS = {1: 12, 16: 6}  # decode steps of a turn, by batch: about 0.2 s on the machines of docs/measurements
START_S, ANSWER_S = 1200.0, 900.0
COMMON: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_hidden_layers": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
LATENT: dict[str, Any] = EXPERTS | {
    "num_key_value_heads": 12, "n_routed_experts": 16, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "q_lora_rank": None, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "head_dim": 32, "n_group": 4, "topk_group": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 256},
    "qwen2": {},
    "qwen3": {},
    "mixtral": EXPERTS | {"num_local_experts": 16, "intermediate_size": 512},
    "qwen3_moe": EXPERTS | {"num_experts": 16},
    "deepseek_v2": LATENT | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT | {"q_lora_rank": 256},
}
TINY = {"vocab_size": 1024, "hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 96}


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the options. An invalid one ends the program."""
    parser = turns_parser(__doc__, "engine")
    parser.add_argument("--before", default=BEFORE, help=f"revision ({BEFORE})")
    parser.add_argument("--after", default="HEAD", help="revision (HEAD)")
    parser.add_argument("--families", type=_list, default=list(FAMILIES), help="with commas")
    parser.add_argument("--dtype", type=_list, help="of bf16 and fp32 (both; with --quick and --tiny bf16)")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time, for one thread on a busy machine")
    options = parser.parse_args(argv)
    options.dtype = options.dtype or (["bf16"] if options.quick or options.tiny else list(DTYPES))
    for unknown in (set(options.families) - set(FAMILIES)) | (set(options.dtype) - set(DTYPES)):
        parser.error(f"unknown: {unknown}")
    if options.cpu_time and options.threads != 1:
        parser.error("--cpu-time needs --threads 1, because the CPU time of threads is a sum")
    return options


def made(cache: Path, family: str, dtype: str, *, tiny: bool) -> Path:
    """Return the folder of a checkpoint, made at the first call."""
    folder = cache / "models" / f"{'tiny-' if tiny else ''}revisions-{family}-{dtype}"
    if not folder.is_dir():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, **COMMON | FAMILIES[family] | (TINY if tiny else {}))
        unfinished = folder.with_suffix(".unfinished")
        transformers.AutoModelForCausalLM.from_config(config).to(DTYPES[dtype]).save_pretrained(unfinished)
        shutil.copy(make_model(cache, "M", dtype, tiny=tiny) / "tokenizer.json", unfinished)
        unfinished.rename(folder)
    return folder


def unpacked(revision: str, folder: Path) -> str:
    """Write the files of a revision into `folder`, and return its abbreviated hash. Ends the program if git fails."""
    try:
        content = _git("archive", "--format=tar", revision)
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(folder, filter="data")
        return _git("rev-parse", "--short", f"{revision}^{{commit}}").decode().strip()
    except subprocess.CalledProcessError as error:
        sys.exit(f"{revision}: {error.stderr.decode().strip()}")


def _git(*command: str) -> bytes:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, check=True).stdout


def started(tree: Path, setup: Setup, stack: ExitStack) -> Child:
    """Start the subject of a revision. Its own packages come first, and `benchmarks.lib.logits` is this file's."""
    program = ROOT / "benchmarks" / "lib" / "logits.py"
    command = ["env", f"PYTHONPATH={tree}", sys.executable, "-P", str(program)]
    child = stack.enter_context(Child(tree.name, command, setup, tree.parent / f"{tree.name}.log"))
    child.start(START_S)
    if not Path(child.about["baton"]).is_relative_to(tree):
        sys.exit(f"measured {child.about['baton']} instead of {tree}")
    return child


def _turn(child: Child, point: Point) -> float:
    """Return the seconds of a prompt, or the median of a few decode steps."""
    if point.batch:
        return float(median(child.ask("steps", ANSWER_S, count=STEPS[point.batch])["seconds"]))
    return float(child.ask("prefill", ANSWER_S, tokens=point.tokens, repeats=1)["seconds"][0])


def _pairs(children: list[Child], point: Point, turns: int) -> list[tuple[float, float]]:
    """Return the seconds before and after of each pair of turns. The order alternates."""
    found = list[tuple[float, float]]()
    for child in children if point.batch else ():
        child.ask("start", ANSWER_S, batch=point.batch, context=point.tokens)
    for number in range(WARM_TURNS + turns):
        seconds = {child.name: _turn(child, point) for child in (children if number % 2 else children[::-1])}
        found.append((seconds["before"], seconds["after"]))
    for child in children if point.batch else ():
        child.ask("end", ANSWER_S)
    return found[WARM_TURNS:]


def compared(trees: list[Path], setup: Setup, turns: int) -> tuple[dict[Point, list[tuple[float, float]]], bool]:
    """Return the seconds before and after of each pair of turns of new processes, and whether all logits are equal."""
    with ExitStack() as stack:
        children = [started(tree, setup, stack) for tree in trees]
        digests = {child.ask("logits", ANSWER_S)["digest"] for child in children}
        return {point: _pairs(children, point, turns) for point in POINTS}, len(digests) == 1


def interval(values: list[float]) -> tuple[float, float]:
    """Return a 95 % confidence interval of the median by order statistics (normal approximation of the binomial)."""
    ordered, half = sorted(values), 1.96 * len(values) ** 0.5 / 2
    low = max(0, int(len(ordered) / 2 - half))
    return ordered[low], ordered[-1 - low]


def row(point: Point, rounds: list[list[tuple[float, float]]]) -> tuple[list[str], float]:
    """Return the cells of a point (speeds, ratio, its interval, the ratios of the rounds), and the ratio."""
    pairs = [pair for each in rounds for pair in each]
    speeds = [f"{point.produced / median(side):.1f}" for side in zip(*pairs, strict=True)]
    ratios = [before / after for before, after in pairs]
    low, high = interval(ratios)
    each = " ".join(f"{median(before / after for before, after in found):.3f}" for found in rounds)
    return [str(point), *speeds, f"{median(ratios):.3f}", f"{low:.3f}-{high:.3f}", each], median(ratios)


def main(argv: list[str]) -> None:
    """Measure and print."""
    options = parse(argv)
    load, rounds, cache = os.getloadavg()[0], number_of_turns(options), options.cache.absolute()
    turns = TINY_TURNS if options.tiny else TURNS
    rows, ratios = list[list[str]](), dict[str, float | None]()
    with tempfile.TemporaryDirectory(prefix="baton-revisions-") as folder:
        trees = [Path(folder, "before"), Path(folder, "after")]
        names = [unpacked(which, tree) for which, tree in zip((options.before, options.after), trees, strict=True)]
        for family, dtype in product(options.families, options.dtype):
            print(f"measuring {family} in {dtype}", file=sys.stderr, flush=True)
            model = str(made(cache, family, dtype, tiny=options.tiny))
            setup = Setup(model, dtype, options.threads, kv_tokens=32_768, cache="", cpu_time=options.cpu_time)
            found = [compared(trees, setup, turns) for _ in range(rounds)]
            equal = "yes" if all(same for _, same in found) else "no"
            for point in POINTS:
                cells, ratios[f"{family}_{dtype}_{point}"] = row(point, [pairs[point] for pairs, _ in found])
                rows.append([family, dtype, *cells, equal])
    columns = [f"{tree.name}: {name}" for tree, name in zip(trees, names, strict=True)]
    head = [*"family dtype point".split(), *columns, "ratio", "95 % interval", "ratio of each round", "equal logits"]
    clock = "CPU time" if options.cpu_time else "time"
    text = (
        f"{options.threads} threads, {rounds} rounds, {turns} turns each, tokens/s by {clock}\n\n{markdown(head, rows)}"
    )
    text += "\n\ntoy models: the figures mean nothing" if options.tiny else ""
    finish("revisions", argv, load, text, ratios, {}, write_docs=False)
    if options.write_docs:
        write_section("measurements/engine.md", "revisions", argv, load, text)


def _list(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    main(sys.argv[1:])
