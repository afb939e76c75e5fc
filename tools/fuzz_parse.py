"""Fuzz the parsers of public messages, the cluster file and messages between workers.

    python tools/fuzz_parse.py                          each target for a minute
    python tools/fuzz_parse.py http peer --seconds 600  two of them, longer
    python tools/fuzz_parse.py http --replay FILE       one input again, with its traceback

The targets are in `tests/fuzzing`. atheris (libFuzzer) mutates inputs towards new lines of Baton, jinja and PyYAML. The
first run installs it into build/fuzz, which also keeps the inputs with new coverage (`corpus-TARGET`) and those that
failed (`TARGET-crash-...`). The exit code is 1 if an input failed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for `python tools/fuzz_parse.py`

NAMES = ("generate", "http", "template", "config", "peer")
REQUIREMENT = "atheris==3.0.0"
BUILD = ROOT / "build" / "fuzz"
LIBRARY = BUILD / "lib"
WATCHED = ["router", "baton", "kvtransfer", "jinja2", "yaml"]  # packages with measured coverage
MOST_BYTES, MOST_SECONDS, MOST_MEMORY = 2048, 20, 4096  # of an input; for an input; MiB of the process


def fuzz(name: str, seconds: int) -> None:
    """Fuzz one target in this process, which libFuzzer ends."""
    sys.path.insert(0, str(LIBRARY))
    import atheris

    with atheris.instrument_imports(include=WATCHED):
        from tests.fuzzing.targets import TARGETS
    corpus = BUILD / f"corpus-{name}"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(TARGETS[name].seeds):
        (corpus / f"seed-{number}").write_bytes(b"\0" + seed)
        (corpus / f"drawn-{number}").write_bytes(b"\1" + random.Random(number).randbytes(MOST_BYTES // 2))
    limits = [f"-max_total_time={seconds}", f"-max_len={MOST_BYTES}", "-len_control=0", f"-timeout={MOST_SECONDS}"]
    options = [*limits, f"-rss_limit_mb={MOST_MEMORY}", f"-artifact_prefix={BUILD}/{name}-"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], TARGETS[name])
    atheris.Fuzz()


def watched(name: str, seconds: int) -> bool:
    """Run one target in its own process and return whether it found nothing. Its output is in build/fuzz/TARGET.log."""
    command = [sys.executable, __file__, name, "--here", "--seconds", str(seconds)]
    log = BUILD / f"{name}.log"
    with log.open("wb") as file:
        ended = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False)
    text = log.read_text(errors="replace")
    done = re.search(r"Done (\d+) runs in (\d+) second", text)
    reached = re.findall(r"cov: (\d+)", text)
    runs = f"{int(done[1]):,} inputs in {done[2]} s" if done else f"ended with {ended.returncode}, see {log}"
    print(f"{name:9} {runs}, {reached[-1] if reached else '?'} branches reached", flush=True)
    return ended.returncode == 0


def install() -> None:
    """Install atheris outside of the environment, because nothing else needs it."""
    if not LIBRARY.is_dir():
        BUILD.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
        subprocess.run([*pip, "--target", str(LIBRARY), REQUIREMENT], check=True)


def main() -> None:
    """Parse the command line and run the targets."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("targets", nargs="*", choices=[*NAMES, "all"], default="all")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (60)")
    parser.add_argument("--replay", type=Path, help="an input of the one target that is named")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = list(NAMES) if "all" in given.targets else given.targets
    os.environ["PYTHONHASHSEED"] = "0"
    if given.replay:
        from tests.fuzzing.targets import TARGETS

        TARGETS[names[0]](given.replay.read_bytes())
    elif given.here:
        fuzz(names[0], given.seconds)
    else:
        install()
        fine = [watched(name, given.seconds) for name in names]
        sys.exit(0 if all(fine) else 1)


if __name__ == "__main__":
    main()
