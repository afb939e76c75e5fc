"""A slice of a recorded trace on 1+1 and 1+2 workers and on two colocated ones, with the predictions of `baton plan`.

    python benchmarks/traces.py --quick           about 10 minutes on 2 cores: 74 requests, one round
    python benchmarks/traces.py                   about 50 minutes: 137 requests, three rounds
    python benchmarks/traces.py --write-docs      docs/measurements/traces.md from it
    python benchmarks/traces.py --tiny            a toy model and a small synthetic trace: to try the program

`--trace` is Mooncake's conversation trace (`FAST25-release/traces/conversation_trace.jsonl` of kvcache-ai/Mooncake). It
is also found in ../shared/data/traces. Without it, a synthetic trace of the same format is replayed. The slice has each
`--every`-th conversation as a whole, because the first requests of a trace share little. `--scale` divides all lengths,
and equal `hash_ids` stay equal tokens. `--rate` is the mean rate, with the trace's bursts.

All workers have one thread, one core and the same KV memory, and run random weights (125 M parameters, bf16) on
configs/no-ray.yaml. The sides take turns in a random order. Each one measures a profile (`baton profile --live`) before
the replay, and `baton plan --what-if` simulates the same slice with it. Ideal hit shares are those of one prefix cache
with whole KV blocks: of unlimited size, and of one worker's size. Both assume that requests follow each other. The
*hit share* is the share of prompt tokens that no worker computed. *KV not moved* is the share of handed-over prompts
that the decode worker had. Values are medians over the rounds. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/traces.py`

from baton.logs import configure_logging
from baton.planner.profile import load_profile
from benchmarks.lib.disagg_run import default_cache, profiled
from benchmarks.lib.models import make_model
from benchmarks.lib.protocol import ROOT
from benchmarks.lib.report import finish, markdown
from benchmarks.lib.trace_figures import figures, ideal, measured, middle, predicted
from benchmarks.lib.trace_run import SIDES, Replayer, Side, write_slice, write_synthetic

if TYPE_CHECKING:
    from baton.bench.traces import Arrival

NAME = "traces"
PUBLISHED = Path("shared/data/traces/conversation_trace.jsonl")
BLOCK = 16  # tokens of a KV block on CPUs
SEEDS = range(3)  # of the step times of a simulation
TINY_REQUESTS = 12
SHOWN = {"hit share": "{:.1%}", "KV not moved, share": "{:.1%}"}  # formats; others have one decimal place
JUDGED = {"hit share": "hit", "TTFT p50, ms": "ttft_p50", "TTFT p99, ms": "ttft_p99", "gap p50, ms": "gap_p50"}
JUDGED |= {"gap p99, ms": "gap_p99", "KV moved, MB": "kv_moved"}

Figures = dict[str, float]


def main(argv: list[str]) -> None:
    """Replay, print, and fill the page if requested."""
    args = parsed(argv)
    configure_logging("warning")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="baton-traces-") as folder:
        replayer = Replayer(prepared(args, Path(folder)), args.scale, args.rate, cluster_settings(args))
        found, blocks = rounds(args, replayer, Path(folder))
        arrivals = replayer.trace().arrivals
    bounds = {"unlimited": ideal(arrivals, BLOCK), "of its size": ideal(arrivals, BLOCK, blocks)}
    shown = f"{described(args, arrivals, blocks, bounds)}\n\n{table(found)}"
    finish(NAME, argv, load, shown, ratios(found, bounds), write_docs=args.write_docs)


def parsed(argv: list[str]) -> argparse.Namespace:
    """Return the options, with those that depend on others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="half as many conversations, one round")
    parser.add_argument("--tiny", action="store_true", help="a toy model and a synthetic trace, one round")
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's format")
    parser.add_argument("--every", type=int, help="replay each so many-th conversation")
    parser.add_argument("--requests", type=int, help="at most so many")
    parser.add_argument("--scale", type=float, default=32.0, help="divisor of all lengths")
    parser.add_argument("--rate", type=float, help="requests/s")
    parser.add_argument("--kv-memory", default="256MiB", help="of each worker")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--profile-s", type=float, help="seconds to measure a profile")
    parser.add_argument("--model", type=Path, help="a folder; default: 125 M parameters, random weights")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder for models")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/measurements/traces.md")
    args = parser.parse_args(argv)
    args.rate = args.rate or (8.0 if args.tiny else 0.75)
    args.rounds = args.rounds or (1 if args.quick or args.tiny else 3)
    args.profile_s = args.profile_s or (5.0 if args.tiny else 60.0)
    args.every = args.every or (160 if args.quick else 80)
    return args


def prepared(args: argparse.Namespace, folder: Path) -> Path:
    """Return a file with the slice. A trace that was not found is replaced by a synthetic one."""
    out = folder / "slice.jsonl"
    nearby = (base / PUBLISHED for base in (ROOT, ROOT.parent))
    source = args.trace or next((path for path in nearby if path.is_file()), None)
    if args.tiny or source is None:
        write_synthetic(out, args.requests or (TINY_REQUESTS if args.tiny else 100))
        args.source = "synthetic"
    else:
        write_slice(source, out, args.every, args.requests)
        args.source = f"{source.name}, each {args.every}th conversation"
    return out


def cluster_settings(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the settings of all sides that depend on the options."""
    model = args.model or make_model(args.cache, "M", "bf16", tiny=args.tiny)
    memory = (f"{role}.kv_memory={args.kv_memory}" for role in ("prefill", "decode"))
    return (f"model.path={model}", *memory)


def rounds(
    args: argparse.Namespace, replayer: Replayer, folder: Path
) -> tuple[dict[str, tuple[list[Figures], list[Figures]]], int]:
    """Return measured and predicted figures of each side and round, and the blocks of a worker's cache."""
    found: dict[str, tuple[list[Figures], list[Figures]]] = {side.name: ([], []) for side in SIDES}
    order, blocks = random.Random(0), 0
    for number in range(args.rounds):
        for side in order.sample(SIDES, len(SIDES)):
            ours, theirs, blocks = compared(args, replayer, side, number, folder)
            found[side.name][0].append(ours)
            found[side.name][1].append(theirs)
            print(f"round {number + 1}, {side.name}: {ours}\n  predicted: {theirs}", file=sys.stderr, flush=True)
    return found, blocks


def compared(
    args: argparse.Namespace, replayer: Replayer, side: Side, number: int, folder: Path
) -> tuple[Figures, Figures, int]:
    """Return the measured and the predicted figures of one replay, and the blocks of a worker's cache."""
    file = folder / f"{side.name}-{number}.json"
    with replayer.running(side) as target:
        profile = load_profile(str(profiled(target, file, args.profile_s)))
        predictions = [replayer.predict(side, file, seed) for seed in SEEDS]
        ours = measured(replayer.replay(target, 100 + number), profile.token_bytes)
    load = replayer.trace().arrivals
    prompts = sum(one.prompt_tokens for one in load)
    theirs = [figures(predicted(report, len(load), prompts, profile.token_bytes)) for report in predictions]
    if ours.errors == len(load):
        raise RuntimeError(f"{side.name}: no request was answered")
    return figures(ours), middle(theirs), profile.layouts[0].kv_tokens // BLOCK


def described(args: argparse.Namespace, arrivals: tuple[Arrival, ...], blocks: int, bounds: Figures) -> str:
    """Return the slice and its ideal hit shares in words."""
    prompts = sum(one.prompt_tokens for one in arrivals)
    answers = sum(one.max_tokens for one in arrivals)
    return (
        f"{args.source}: {len(arrivals)} requests at {args.rate:g}/s, lengths divided by {args.scale:g}: "
        f"{prompts / len(arrivals):.0f} prompt tokens (up to {max(one.prompt_tokens for one in arrivals)}) and "
        f"{answers / len(arrivals):.1f} new ones. Ideal hit share: {bounds['unlimited']:.1%} with an unlimited cache, "
        f"{bounds['of its size']:.1%} with {blocks} blocks of {BLOCK} tokens, the cache of one worker. "
        f"Measured / predicted (ratio), {args.rounds} rounds."
    )


def table(found: dict[str, tuple[list[Figures], list[Figures]]]) -> str:
    """Return a row per figure and a column per side: measured / predicted, and the ratio."""
    pairs = {side: (middle(ours), middle(theirs)) for side, (ours, theirs) in found.items()}
    names = list(next(iter(pairs.values()))[0])
    rows = [[name, *(cell(name, ours[name], theirs[name]) for ours, theirs in pairs.values())] for name in names]
    return markdown(["", *pairs], rows)


def cell(name: str, ours: float, theirs: float) -> str:
    """Return a measured and a predicted value, and their ratio if the prediction is not 0."""
    form = SHOWN.get(name, "{:.1f}")
    if name == "handoffs":  # a plan counts requests that end with their first token too
        return f"{ours:.0f}"
    ratio = f" ({ours / theirs:.2f})" if theirs else ""
    return f"{form.format(ours)} / {form.format(theirs)}{ratio}"


def ratios(found: dict[str, tuple[list[Figures], list[Figures]]], bounds: Figures) -> dict[str, float | None]:
    """Return hit shares against the ideal, and measured over predicted figures, of each side."""
    result: dict[str, float | None] = {}
    for side, (all_ours, all_theirs) in found.items():
        ours, theirs, key = middle(all_ours), middle(all_theirs), side.replace("+", "_")
        of_size = bounds["of its size"]
        result[f"{key}_hit_vs_ideal"] = round(ours["hit share"] / of_size, 4) if of_size else None
        for name, short in JUDGED.items():
            result[f"{key}_{short}_vs_plan"] = round(ours[name] / theirs[name], 4) if theirs[name] else None
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
