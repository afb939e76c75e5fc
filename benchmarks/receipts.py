"""Receipts of a run with deaths, all replayed; flipped bits of KV, and the fingerprints that agree.

    python benchmarks/receipts.py                     1,000 receipts while 20 processes are killed, then their replay
    python benchmarks/receipts.py --quick             24 receipts and 2 deaths
    python benchmarks/receipts.py --matrix            which levels, threads and dtypes give equal bits

A cluster of one prefill worker, two decode workers and a router serves the demo model. Requests with mixed parameters
ask for a receipt, while one process after the other gets SIGKILL. `baton replay` then computes all answers again.
`--flips` answers have one flipped bit of K or V in an engine's cache. The replay of their receipts must report the
first token with other bits, as a comparison of the values does. A flip without an effect on any bit is not counted.
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/receipts.py`

from baton.engine.kernels.cpu.compiler import LEVELS
from baton.logs import configure_logging
from baton.receipts.keys import ReceiptKey
from benchmarks.lib.determinism_levels import here
from benchmarks.lib.receipt_flips import Flips, measure
from benchmarks.lib.receipt_matrix import matrix
from benchmarks.lib.receipt_run import SETS, Collected, collect, replay
from benchmarks.lib.report import finish, markdown
from tests.support.cluster_process import Home

NAME = "receipts"


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="24 receipts, 2 deaths and 10 flips")
    parser.add_argument("--count", type=int, help="receipts (1000)")
    parser.add_argument("--deaths", type=int, help="processes that are killed during the run (20)")
    parser.add_argument("--flips", type=int, help="flipped bits of KV (200)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--matrix", action="store_true", help="only compare levels, threads and dtypes")
    parser.add_argument("--prompts", type=int, default=50, help="answers of each setting of the matrix")
    parser.add_argument("--keep", type=Path, help="folder for the receipts and the result of their replay")
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/measurements/receipts.md")
    args = parser.parse_args(argv)
    count, deaths, flips = (24, 2, 10) if args.quick else (1000, 20, 200)
    args.count, args.deaths, args.flips = args.count or count, args.deaths or deaths, args.flips or flips
    return args


def new_key(folder: Path) -> tuple[Path, Path]:
    """Make a key and return the files of its private and public part."""
    private, public = folder / "receipt.pem", folder / "public.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True, capture_output=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    private.chmod(0o600)
    return private, public


def run(args: argparse.Namespace, folder: Path) -> tuple[Collected, dict[str, int], Flips]:
    """Collect and replay receipts, and flip bits."""
    private, public = new_key(folder)
    home, kept = folder / "home", args.keep or folder
    home.mkdir()
    kept.mkdir(parents=True, exist_ok=True)
    with Home(home).cluster("configs/no-ray.yaml", *SETS, f"security.receipt_key={private}", name=NAME) as cluster:
        found = collect(cluster, args.count, args.deaths, args.seed)
        file = kept / "receipts.jsonl"
        file.write_text("".join(f"{line}\n" for line in found.lines))
        outcomes = replay(cluster, file, public)
    for outcome in outcomes.pop("outcomes"):
        if outcome["result"] != "equal":
            print(outcome, file=sys.stderr)
    return found, outcomes, measure(args.flips, args.seed, ReceiptKey.read(private))


def shown(found: Collected, outcomes: dict[str, int], flips: Flips) -> str:
    """Return the counts as a table."""
    killed = ", ".join(f"{count} {role}" for role, count in sorted(found.killed.items()))
    rows = [
        ["receipts", str(outcomes["receipts"])],
        ["equal on replay", str(outcomes.get("equal", 0))],
        ["differ", str(outcomes.get("differs", 0))],
        ["errors", str(outcomes.get("error", 0))],
        ["processes killed", killed],
        ["answers that another worker continued", str(found.again)],
        ["streams that another router resumed", str(found.resumed)],
        ["requests that failed and were sent again", str(found.failed)],
        ["flipped bits that changed the next token, found there", str(flips.found)],
        ["flipped bits that changed a later token, found there", str(flips.later)],
        ["flipped bits without an effect on any bit", str(flips.without)],
        ["flipped bits that ended the request with an error", str(flips.failed)],
        ["flipped bits that the replay missed or misplaced", str(flips.missed)],
    ]
    return markdown(["", "count"], rows)


def main(argv: list[str]) -> None:
    """Measure, print, and fill the section of the page if requested."""
    args, load = parse(argv), os.getloadavg()[0]
    configure_logging("warning", "auto")
    if args.matrix:
        text, figures = matrix(here([*LEVELS]), args.prompts)
        finish(NAME, argv, load, text, {}, figures, write_docs=args.write_docs, section=f"{NAME}-matrix")
        return
    with tempfile.TemporaryDirectory(prefix="baton-receipts-") as folder:
        found, outcomes, flips = run(args, Path(folder))
    ratios = {
        "receipts": float(outcomes["receipts"]),
        "equal": float(outcomes.get("equal", 0)),
        "flipped": float(flips.found + flips.later + flips.missed),
        "flipped_found": float(flips.found + flips.later),
        "deaths": float(sum(found.killed.values())),
    }
    finish(NAME, argv, load, shown(found, outcomes, flips), ratios, write_docs=args.write_docs)


if __name__ == "__main__":
    main(sys.argv[1:])
