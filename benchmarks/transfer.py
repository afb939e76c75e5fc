"""KV transfer speed as a share of this machine's limit, and the part that a request waits for.

    python benchmarks/transfer.py --quick         under 10 minutes on 2 cores
    python benchmarks/transfer.py --write-docs    more rounds; section and pictures in docs/measurements/ from them
    python benchmarks/transfer.py --sweep         other frame sizes, slots and thresholds than the defaults as well
    python benchmarks/transfer.py --gpu           on a GPU machine: CUDA IPC (one GPU) and NCCL (two) instead

The last line of stdout is one JSON object with the ratios, which benchmarks/lib/transfer_figures.py defines.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/transfer.py`

from benchmarks.lib.machine import machine
from benchmarks.lib.models import make_model
from benchmarks.lib.protocol import ROOT, ChildFailed
from benchmarks.lib.report import fill
from benchmarks.lib.transfer_exposure import measure_prompts
from benchmarks.lib.transfer_figures import Figures, ratios
from benchmarks.lib.transfer_handoffs import measure_sizes, measure_small
from benchmarks.lib.transfer_measure import DEFAULTS, DTYPE, GPU_DEVICES, Plan, Results, Where
from benchmarks.lib.transfer_plot import plot, plot_timeline
from benchmarks.lib.transfer_report import ratio_table, sweep_table, tables, timeline_table
from benchmarks.lib.transfer_slowdown import measure_slowdown, slowdown, slowdown_table
from benchmarks.lib.transfer_sweep import sweep_coalescing, sweep_frames

if TYPE_CHECKING:
    from collections.abc import Callable

DOCS = ROOT / "docs" / "measurements"
MIB = 1 << 20
HAS_NIXL = find_spec("nixl") is not None
BUSY = 0.05  # runs with more other load are marked


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the options. An invalid one ends the program."""
    home = Path(os.environ.get("BATON_HOME") or Path.home() / ".baton").expanduser()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under 10 minutes")
    parser.add_argument("--sweep", action="store_true", help="measure other settings than the defaults as well")
    parser.add_argument("--gpu", action="store_true", help="KV on GPUs, over cuda_ipc and nccl; no prompts")
    parser.add_argument("--transports", type=_names, help="such as gloo,shm")
    parser.add_argument("--sizes", type=_numbers, default=[1, 4, 16, 64, 256], help="of the KV, in MiB")
    parser.add_argument("--prompts", type=_numbers, default=[128, 512, 1024, 2048], help="in tokens; 0: none")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--ranks", type=int, default=1, help="tensor_parallel of both workers; with --prompts 0")
    parser.add_argument("--only", help="measure only this part, such as prefill_slowdown")
    parser.add_argument("--tiny", action="store_true", help="toy models: to try the program, not to measure")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for raw results and logs")
    parser.add_argument("--cache", type=Path, default=home / "bench", help="folder for models")
    parser.add_argument("--write-docs", action="store_true", help="put tables and pictures into docs/measurements/")
    args = parser.parse_args(argv)
    args.cache, args.out = args.cache.absolute(), args.out.absolute()
    return args


def plan_of(args: argparse.Namespace) -> Plan:
    """Return the plan for the options."""
    rounds, prompt_rounds = (7, 3) if args.quick else (21, 9)
    return Plan(
        sizes=[size * MIB for size in args.sizes],
        rounds=args.rounds or rounds,
        prompts=[] if args.gpu else [tokens for tokens in args.prompts if tokens],
        prompt_rounds=args.rounds or prompt_rounds,
        transports=args.transports or (list(GPU_DEVICES) if args.gpu else ["gloo", "shm", *["nixl"] * HAS_NIXL]),
    )


def measure(args: argparse.Namespace, plan: Plan) -> Results:
    """Run each part in its own processes. A failed part is recorded, and the others continue."""
    large, small = (make_model(args.cache, size, DTYPE, tiny=args.tiny) for size in ("L", "S"))
    where, results = Where(large, small, args.cache, args.out, args.ranks), Results()
    parts: dict[str, Callable[[Plan, Where, Results], None]] = {
        "sizes": measure_sizes,
        "a short prompt": measure_small,
        **({} if args.gpu else {"prefill_slowdown": measure_slowdown}),
        **({"prompts": measure_prompts} if plan.prompts else {}),
        **({"frames": sweep_frames} if args.sweep else {}),
        **({"coalescing": sweep_coalescing} if args.sweep and plan.prompts else {}),
    }
    if args.only not in {None, *parts}:
        sys.exit(f"--only: must be one of {', '.join(parts)}, got {args.only!r}")
    for name, part in parts.items():
        if args.only not in {None, name}:
            continue
        print(f"measuring {name}", file=sys.stderr, flush=True)
        try:
            part(plan, where, results)
        except ChildFailed as error:
            results.drop(name, error)
    return results


def main(argv: list[str]) -> None:
    """Measure, and write tables, raw results, pictures, docs and last line."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    results = measure(args, plan_of(args))
    absent = {} if HAS_NIXL else {"nixl": "it is not installed (the extra nixl)"}
    figures = Figures(results.moved, results.prompts)
    found, facts = ratios(figures) | {"prefill_slowdown": slowdown(results)}, _facts(argv, args, results)
    raw = {
        "facts": facts,
        "ratios": found,
        "missing": {**results.missing, **absent},
        "sweeps": results.sweeps,
        "results": results.raw,
    }
    (args.out / "transfer.json").write_text(json.dumps(raw, indent=1))
    text = "\n\n".join(
        ("\n".join(f"- {name}: {value}" for name, value in facts.items()), *_tables(figures, results, absent))
    )
    print(text, flush=True)
    (args.out / "transfer-timeline.txt").write_text(timeline_table(results.timeline) + "\n")
    for folder in [args.out, *([DOCS] if args.write_docs else [])]:
        plot(figures, folder / "transfer.svg")
        plot_timeline(results.timeline, folder / "transfer-timeline.svg")
    if args.write_docs:
        _write_docs(text)
    print(json.dumps({"benchmark": "transfer", "ratios": found}))
    if results.missing and not args.gpu:
        sys.exit("not all could be measured")


def _tables(figures: Figures, results: Results, absent: dict[str, str]) -> list[str]:
    sweeps = [f"### {title}\n\n{sweep_table(rows)}" for title, rows in results.sweeps.items()]
    found = ratios(figures) | {"prefill_slowdown": slowdown(results)}
    slowed = f"### A prefill step while its KV is read\n\n{slowdown_table(results)}"
    missing = {**results.missing, **absent}
    return [ratio_table(found, missing), tables(figures), *([slowed] if results.slowed else []), *sweeps]


def _facts(argv: list[str], args: argparse.Namespace, results: Results) -> dict[str, str]:
    loads = [answer["other_load"] for answer in results.raw]
    other = median(loads) if loads else 0.0
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", "benchmarks/transfer.py", *argv]),
        **machine(),
        "KV": f"{DTYPE}, blocks of 16 in no order" + (", toy models: the figures mean nothing" if args.tiny else ""),
        "frames": f"{DEFAULTS.frame_size >> 10} KiB, {DEFAULTS.credits} slots, "
        f"held back below {DEFAULTS.coalesce_below >> 10} KiB",
        "digests": "of each frame over gloo and nixl; of the whole KV in rows marked so",
        "other load": f"{other:.0%} of the CPU" + (": **a busy machine, rough figures**" if other > BUSY else ""),
    }


def _write_docs(text: str) -> None:
    titles = {"transfer.svg": "Speed, and what a request waits for", "transfer-timeline.svg": "Frames of one prompt"}
    links = "".join(f"![{title}]({name})\n\n" for name, title in titles.items() if (DOCS / name).exists())
    page = DOCS / "transfer.md"
    page.write_text(fill(page.read_text(), links + text, "transfer"))


def _names(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main(sys.argv[1:])
