"""Speculation on against off: speed in turns of one process, and equality of streams.

    python benchmarks/speculation.py --quick          two rounds, and 200 streams, in a few minutes
    python benchmarks/speculation.py --write-docs     five rounds, 1,000 streams, and docs/measurements/speculation.md

`copy_b1`: tokens/s of one sequence whose answer repeats parts of its prompt (edits, summaries, JSON), on over off. The
model has random weights and its full cost; the written answer is forced on its draws. `random_b16`: 16 sequences of
random text with nothing to repeat. `identical_streams`: share of equal streams of all features on the demo model.
`--peers transformers,llama.cpp` measures their prompt lookup on the same answers, in processes of their own that stop
while others work; llama.cpp is compiled at first. `vs NAME`: our tokens/s with proposals over theirs.
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/speculation.py`

import torch

from baton.engine.kernels.cpu.compiler import level_here
from baton.engine.models.loading import load_model
from baton.tokenizer import load_tokenizer
from benchmarks.lib.models import make_model
from benchmarks.lib.protocol import ROOT
from benchmarks.lib.report import finish, markdown
from benchmarks.lib.speculation_identity import identical
from benchmarks.lib.speculation_peers import MISSING, PROGRAMS, Peers
from benchmarks.lib.speculation_run import Pair, Rates
from benchmarks.lib.speculation_texts import tasks
from benchmarks.lib.turns import number_of_turns, turns_parser

KINDS = ("edit", "summary", "json")
BATCH, RANDOM_PROMPT, RANDOM_TOKENS = 16, 128, 96
DTYPES = ("bfloat16", "float32")  # of the demo model


def measured(pair: Pair, turns: int, peers: Peers) -> tuple[dict[str, Rates], float]:
    """Return rates by kind, and the share of accepted proposals of the repeating kinds."""
    found = {kind: Rates() for kind in (*KINDS, "random")}
    for turn in range(turns + 1):  # the first one warms up
        for task in tasks(1 + turn)[-3:]:
            rates, spec = found[task.kind] if turn else Rates(), pair.scripted(task.prompt, task.answer, seed=turn)
            pair.turn([spec], rates, reverse=turn % 2 == 1)
            answer = pair.backend.script[len(spec.prompt) :]
            peers.turn(task.kind, spec.prompt, answer, reverse=turn % 2 == 1, counts=turn > 0)
    counters = pair.speculating.counters
    accepted = counters.accepted_tokens / max(counters.speculated_tokens, 1)
    for turn in range(turns + 1):
        specs = pair.randoms(BATCH, RANDOM_PROMPT, RANDOM_TOKENS, seed=turn)
        pair.turn(specs, found["random"] if turn else Rates(), reverse=turn % 2 == 1)
    return found, accepted


def table(found: dict[str, Rates], peers: Peers) -> str:
    """Return the table of rates in tokens/s, with the spread of the ratios."""
    rows = []
    for name, kinds in {"Baton": found, **peers.rates}.items():
        for kind, rates in kinds.items():
            ratios, batch = rates.ratios(), BATCH if kind == "random" else 1
            speeds = [f"{median(each):.1f}" for each in (rates.plain, rates.speculating)]
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            rows.append([name, kind, f"B{batch}", *speeds, f"{median(ratios):.2f}", spread])
    return markdown(["engine", "answers", "batch", "off", "on", "ratio", "of all turns"], rows)


def against(found: dict[str, Rates], peers: Peers) -> dict[str, float | None]:
    """Return the median of our rates with proposals over those of each peer, on the same answers."""
    ratios: dict[str, float | None] = {f"vs {name}": None for name in (*PROGRAMS, *MISSING)}
    for name, kinds in peers.rates.items():
        pairs = [zip(found[kind].speculating, kinds[kind].speculating, strict=True) for kind in KINDS]
        ratios[f"vs {name}"] = median(ours / theirs for each in pairs for ours, theirs in each)
    return ratios


def main(argv: list[str]) -> None:
    """Measure and print."""
    parser = turns_parser(__doc__, "speculation")
    parser.add_argument("--peers", default="", help=f"of {', '.join(PROGRAMS)}; none by default")
    options, load = parser.parse_args(argv), os.getloadavg()[0]
    torch.set_num_threads(options.threads)
    folder = make_model(options.cache.absolute(), "M", "bf16", tiny=options.tiny)
    pair = Pair(load_model(folder, dtype="bfloat16"), load_tokenizer(folder))
    with Peers(options.peers.split(","), folder, options.cache.absolute(), options.threads) as peers:
        found, accepted = measured(pair, number_of_turns(options), peers)
    count, equal = (50 if options.tiny else 200 if options.quick else 1000), 0
    shares = list[float]()
    for dtype in DTYPES:
        demo = ROOT / "models" / "demo"
        same, share = identical(load_model(demo, dtype=dtype), load_tokenizer(demo), count // len(DTYPES))
        equal, shares = equal + same, [*shares, share]
    copies = [ratio for kind in KINDS for ratio in found[kind].ratios()]
    ratios: dict[str, float | None] = {
        "copy_b1": median(copies),
        "random_b16": median(found["random"].ratios()),
        "accepted_share": accepted,
        "identical_streams": equal / count,
        **against(found, peers),
    }
    head = f"125 M parameters in bfloat16, level {level_here()}, {options.threads} threads, tokens/s while decoding"
    notes = [
        f"Accepted: {accepted:.0%} of all proposals of the repeating answers.",
        f"Equal: {equal} of {count} streams",
    ]
    notes[1] += (
        f" of all features on the demo model, with {min(shares):.0%} to {max(shares):.0%} of proposals accepted."
    )
    notes += [f"Not measured: {name}, because {reason}." for name, reason in peers.missing.items()]
    shown = "\n\n".join((head, table(found, peers), "\n".join(f"- {note}" for note in notes)))
    finish("speculation", argv, load, shown, ratios, write_docs=options.write_docs)


if __name__ == "__main__":
    main(sys.argv[1:])
