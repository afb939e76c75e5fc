"""Cost of deterministic requests: throughput by their share, relative to none, against other ways to be deterministic.

    python benchmarks/determinism.py --quick                     under 5 minutes on one core
    python benchmarks/determinism.py --quick --lengths azure --trace FILE
    python benchmarks/determinism.py --trace FILE                under 20: both loads, and a sweep of verify passes
    python benchmarks/determinism.py --trace FILE --write-docs   the section in docs/measurements/determinism.md from it
    python benchmarks/determinism.py --level avx2,avx512 --quantize none,int8    100 % against 0 % at these levels
    python benchmarks/determinism.py --agreement 200             streams of models/demo that are equal between levels
    python benchmarks/determinism.py --model models/demo,build/text    verify passes with trained models

One engine runs in this process, on one thread, in bfloat16. Attention splits depend on load, so that candidates differ
from verified tokens. `--splits load` has float32 partials, as on GPU servers. `load_bf16` rounds them to bfloat16, so
that more candidates are wrong than on such servers. All requests are there from the start, and 16 run concurrently.
Each round runs every variant, in a new order. Ratios are within a round, and the tables have their median and spread.
- no suffix: as in workers (`determinism.verify: auto`), with exact decode steps where possible;
- *verify passes*: candidates of the ordinary batch are computed again (`determinism.verify: always`);
- *all wait*: the same, and every due candidate is verified immediately;
- *fixed shape*: every decode step has all its rows, so that bits do not depend on load;
- *one at a time*: nothing is batched.

Lengths `fixed` are 128 tokens for prompts and answers each. Lengths `azure` are a random sample (`--seed`, new in each
round) of the conversations in `--trace FILE`: AzureLLMInferenceTrace_conv.csv of Azure/AzurePublicDataset, which is not
part of this repository. Prompts are cut to 512 tokens and answers to 256, and token ids are random. Without the file,
the full run leaves this part out and reports that. The last line of stdout is one JSON object with the figures.

`--level` and `--quantize` measure only all requests deterministic against none, in turns, for each level of
instructions and each kind of weights. `--agreement N` compares the answers to N prompts of models/heldout.jsonl
between levels. `--model` measures verify passes without exact steps with trained models (`models.train_text` trains
one of 15 M parameters): shares, a sweep of G x W with `--sweep`, each level with `--level`. All of these fill a section
of their own with `--write-docs`. The keys of `--model` are those of the worst model.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/determinism.py`

import torch

from baton.engine.determinism.checks import checked_shapes
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.kernels.cpu.compiler import LEVELS, chosen_level
from baton.engine.kernels.quantized import Quantize
from baton.engine.models.loading import load_model
from baton.logs import configure_logging
from baton.tokenizer import load_tokenizer
from benchmarks.lib.determinism_levels import agreement, backends, here
from benchmarks.lib.determinism_run import Load, Took, engine_of, run
from benchmarks.lib.determinism_table import figures, ratios, table
from benchmarks.lib.determinism_trained import KEYS, measure_verified, paper_table, ratio, verified_table, worst
from benchmarks.lib.lengths import read_trace, sampled
from benchmarks.lib.models import make_model
from benchmarks.lib.report import finish, markdown, write_section

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.engine.model_backend import ModelBackend
    from baton.tokenizer import Tokenizer
    from benchmarks.lib.lengths import Lengths

    Runs = dict[str, list[Took]]

NAME = "determinism"
SHARES = {"auto": (0.02, 0.1, 0.5, 1.0), "always": (0.1, 0.5, 1.0)}
SWEEP = ((1, 32), (1, 64), (2, 16), (2, 32), (4, 8), (4, 16), (4, 32), (8, 8), (8, 16))
RUNNING = 16
NONE = "0% deterministic"


class Variant(NamedTuple):
    """One measured variant. `verify` is as in a cluster file; `always` does not use exact steps."""

    name: str
    share: float
    shapes: FixedShapes
    verify: Literal["auto", "always"] = "always"
    running: int = RUNNING
    fixed_decode: bool = False


class Part(NamedTuple):
    """One table. `lengths` are those of each round; `key` is the prefix of its figures."""

    name: str
    key: str
    lengths: list[Lengths]
    variants: list[Variant]


def shares(shapes: FixedShapes, requests: int) -> list[Variant]:
    """Return the variants in table order, the baseline first, without shares that round to no request."""
    found = [Variant(NONE, 0.0, shapes)]
    if shapes.exact_rows:
        found += [Variant(f"{share:.0%} deterministic", share, shapes, "auto") for share in SHARES["auto"]]
    found += [Variant(f"{share:.0%} deterministic, verify passes", share, shapes) for share in SHARES["always"]]
    return [variant for variant in found if variant is found[0] or round(variant.share * requests)]


def others(shapes: FixedShapes) -> list[Variant]:
    """Return other ways for comparison."""
    stalls = replace(shapes, stalls=True)
    return [
        *(Variant(f"{x:.0%} deterministic, verify passes, all wait", x, stalls) for x in (0.5, 1.0)),
        Variant("fixed shape", 0.0, shapes, fixed_decode=True),
        Variant("one at a time", 0.0, shapes, running=1),
    ]


def sweep(shapes: FixedShapes) -> list[Variant]:
    """Return verify passes of other shapes."""
    return [Variant(NONE, 0.0, shapes), *(Variant(f"100%, {g} x {w}", 1.0, FixedShapes(g, w)) for g, w in SWEEP)]


def parts_of(args: argparse.Namespace, trace: Lengths, shapes: FixedShapes) -> list[Part]:
    """Return the parts for the options. The trace is optional."""
    rng, parts = random.Random(args.seed), list[Part]()
    fixed: Lengths = ((args.prompt, args.answer),) * args.requests
    if args.lengths != "azure":
        parts.append(
            Part(
                f"{args.prompt} + {args.answer} tokens each",
                "",
                [fixed] * args.rounds,
                shares(shapes, args.requests) + others(shapes),
            )
        )
    if trace:
        fewer = args.requests * 3 // 4  # which are longer
        real = [sampled(trace, fewer, rng) for _ in range(min(args.rounds, 2))]
        parts.append(Part(f"Azure conversations, seed {args.seed}", "azure: ", real, shares(shapes, fewer)))
    if args.lengths is None and not args.quick:
        parts.append(Part("shapes of verify passes", "sweep: ", [fixed] * min(args.rounds, 2), sweep(shapes)))
    return parts


def measure(backend: ModelBackend, tokenizer: Tokenizer, parts: Sequence[Part]) -> list[Runs]:
    """Run each part: every variant in each round, after one warm-up."""
    order = random.Random(0)
    found: list[Runs] = []

    def turn(variant: Variant, lengths: Lengths, seed: int) -> Took:
        # One at a time, a few requests take as long as all of them in a batch.
        count = len(lengths) if variant.running > 1 else max(2, len(lengths) // 8)
        load = Load(lengths[:count], variant.running, variant.share, seed=seed)
        shapes = variant.shapes if variant.verify == "auto" else replace(variant.shapes, exact_rows=0)
        return run(engine_of(backend, tokenizer, load, shapes, fixed_decode=variant.fixed_decode), load)

    for part in parts:
        found.append({variant.name: [] for variant in part.variants})
        for variant in part.variants:
            turn(variant, tuple((prompt, 4) for prompt, _ in part.lengths[0][:RUNNING]), -1)
        for number, lengths in enumerate(part.lengths):
            for variant in order.sample(part.variants, len(part.variants)):
                took = turn(variant, lengths, number)
                found[-1][variant.name].append(took)
                text = f"{part.name}, round {number}: {variant.name}: {took.tokens_per_s:.0f} tokens/s"
                print(text, file=sys.stderr, flush=True)
    return found


def by_level(args: argparse.Namespace, levels: list[str], folder: Path) -> tuple[str, dict[str, float]]:
    """Measure all deterministic against none, in turns, at each level with each kind of weights."""
    rows, ratios_of = list[list[str]](), dict[str, float]()
    lengths: list[Lengths] = [((args.prompt, args.answer),) * args.requests] * args.rounds
    shapes, weights = FixedShapes(args.rows, args.window, exact_rows=RUNNING), [("bfloat16", q) for q in args.quantize]
    tokenizer = load_tokenizer(folder)
    for level, _, quantize, backend, checked in backends(folder, levels, weights, args.splits, shapes):
        name = f"{level}, {'bfloat16' if quantize == 'none' else quantize}"
        both = [Variant(NONE, 0.0, checked), Variant("100% deterministic", 1.0, checked, "auto")]
        none, everything = measure(backend, tokenizer, [Part(name, "", lengths, both)])[0].values()
        shares = [one.tokens_per_s / other.tokens_per_s for one, other in zip(everything, none, strict=True)]
        spread = f"{median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})"
        speeds = [f"{median(each.tokens_per_s for each in runs):,.0f}" for runs in (none, everything)]
        rows.append([name, str(checked.exact_rows), *speeds, spread])
        ratios_of[name] = round(median(shares), 4)
    return markdown(["", "exact rows", "tokens/s, 0 %", "tokens/s, 100 %", "ratio (spread)"], rows), ratios_of


def listed(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of a list of some of these names."""

    def parsed(text: str) -> list[str]:
        names = text.split(",")
        if wrong := [name for name in names if name not in allowed]:
            raise argparse.ArgumentTypeError(f"must be some of {', '.join(allowed)}, got {wrong[0]!r}")
        return names

    return parsed


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Lengths]:
    """Parse the options and read the trace. Exits if they are invalid."""
    home = Path(os.environ.get("BATON_HOME") or Path.home() / ".baton").expanduser()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, one load, no sweep")
    parser.add_argument("--lengths", choices=("fixed", "azure"), help="one load only, and no sweep")
    parser.add_argument("--trace", type=Path, help="AzureLLMInferenceTrace_conv.csv")
    parser.add_argument("--splits", choices=("load", "load_bf16"), default="load", help="of the ordinary batch")
    parser.add_argument("--seed", type=int, default=0, help="of the sample of the trace")
    parser.add_argument("--rounds", type=int, help="of the shares; of what follows them at most 2")
    parser.add_argument("--requests", type=int, help="in each run; of a trace three quarters as many")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--answer", type=int, default=128, help="tokens")
    parser.add_argument("--rows", type=int, default=FixedShapes().rows, help="of a verify pass")
    parser.add_argument("--window", type=int, default=FixedShapes().tokens, help="tokens of each row")
    parser.add_argument("--level", type=listed([*LEVELS]), help="some levels of instructions, with commas between")
    parser.add_argument("--quantize", type=listed(get_args(Quantize)), help="some kinds of weights")
    parser.add_argument("--model", type=lambda text: [*map(Path, text.split(","))], help="folders of trained models")
    parser.add_argument("--sweep", action="store_true", help="with --model: other shapes of passes instead of shares")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="of the ratios of --model")
    parser.add_argument("--agreement", type=int, metavar="N", help="compare answers to N prompts between levels")
    parser.add_argument("--size", choices=("S", "M", "L"), default="M")
    parser.add_argument("--tiny", action="store_true", help="a toy model: to try the program, not to measure")
    parser.add_argument("--cache", type=Path, default=home / "bench", help="folder for models")
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/measurements/")
    args = parser.parse_args(argv)
    if args.lengths == "azure" and not args.trace:
        parser.error("--lengths azure needs --trace FILE")
    if args.quick and args.lengths is None:
        args.lengths = "fixed"
    args.rounds, args.requests = args.rounds or (2 if args.quick else 4), args.requests or 32
    try:
        return args, read_trace(args.trace) if args.trace and args.lengths != "fixed" else ()
    except (OSError, ValueError) as error:
        parser.error(f"--trace: {error}")


def with_trained(args: argparse.Namespace, argv: list[str], load: float) -> None:
    """Measure verify passes with trained models, print, and fill the section for that if requested."""
    levels, tables, measured = here(args.level or [chosen_level()]), list[str](), dict[str, "Runs"]()
    numbers = dict[str, float]()
    for folder in args.model:
        for level, runs in measure_verified(folder, levels, args, "sweep" if args.sweep else "shares"):
            name = f"{folder.name}, {args.prompt} + {args.answer}, {level}"
            tables.append(f"**{name}**\n\n{verified_table(runs, args.clock)}")
            measured[name] = runs
            numbers |= {f"{name}: {each}": round(median(ratio(runs, each, args.clock)), 4) for each in runs}
    if not args.sweep:
        tables.append(f"**Throughput by share, of none**\n\n{paper_table(measured, args.clock)}")
    shown = "\n\n".join(tables)
    if args.write_docs:
        section = f"{NAME}-{'sweep' if args.sweep else 'trained'}"
        write_section(f"measurements/{NAME}.md", NAME, argv, load, shown, section)
    keys = dict.fromkeys(KEYS) | ({} if args.sweep else worst(measured, args.clock))
    finish(NAME, argv, load, shown, keys, numbers, write_docs=False)


def compare_levels(args: argparse.Namespace, argv: list[str], load: float) -> None:
    """Compare levels of instructions, print, and fill the section for that if requested."""
    levels, args.quantize = here(args.level or [*LEVELS]), args.quantize or ["none"]
    if args.agreement:
        shown, figures = agreement(levels, args.agreement)
    else:
        shown, figures = by_level(args, levels, make_model(args.cache, args.size, "bf16", tiny=args.tiny))
    if args.write_docs:
        section = f"{NAME}-{'agreement' if args.agreement else 'levels'}"
        write_section(f"measurements/{NAME}.md", NAME, argv, load, shown, section)
    finish(NAME, argv, load, shown, {}, figures, write_docs=False)


def main(argv: list[str]) -> None:
    """Measure, print, and fill the section of the page if requested."""
    args, trace = parse(argv)
    configure_logging("warning", "auto")
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    if args.model:
        with_trained(args, argv, load)
        return
    if args.agreement or args.level or args.quantize:
        compare_levels(args, argv, load)
        return
    folder = make_model(args.cache, args.size, "bf16", tiny=args.tiny)
    backend = load_model(folder, dtype="bfloat16", attention_splits=args.splits)
    shapes = checked_shapes(backend, FixedShapes(args.rows, args.window, exact_rows=RUNNING))
    if shapes is None:
        raise SystemExit(f"deterministic requests are not possible here: {backend.nondeterminism}")
    parts = parts_of(args, trace, shapes)
    found, numbers, tables = measure(backend, load_tokenizer(folder), parts), dict[str, float](), list[str]()
    for part, runs in zip(parts, found, strict=True):
        tables.append(f"**{part.name}**\n\n{table(runs)}")
        numbers |= figures(runs, part.key)
    notes = ["Times are p50 / p99."]
    if not shapes.exact_rows:
        notes.append("No decode step is exact here: each deterministic token needs a verify pass.")
    if args.lengths is None and not trace:
        notes.append("Lengths of real conversations were not measured: no `--trace`.")
    told = [word.replace(str(args.trace), args.trace.name) for word in argv] if args.trace else argv  # no private paths
    finish(NAME, told, load, "\n\n".join([*tables, *notes]), ratios(found[0]), numbers, write_docs=args.write_docs)


if __name__ == "__main__":
    main(sys.argv[1:])
