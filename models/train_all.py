"""Train the models of the three ways (thinking states, chain of thought, neither) on all tasks, except models/coin.

    python models/train_all.py FOLDER [TASK-KIND ...]

Each goes to FOLDER/TASK-KIND. A training that was stopped goes on where it was, and a finished one is not repeated.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python models/train_all.py`

from models.tasks.registry import KINDS, TASKS

# The chain of thought of the coin is first, because the benchmark's main figures need it.
NAMES = sorted(f"{task}-{kind}" for task in TASKS for kind in KINDS if (task, kind) != ("coin", "thinking"))


def main() -> None:
    """Train one model after the other."""
    folder, *chosen = sys.argv[1:]
    for name in chosen or sorted(NAMES, key=lambda name: name != "coin-cot"):
        task, _, kind = name.rpartition("-")
        out = Path(folder) / name
        if (out / "tokenizer_config.json").exists():  # the last file of a training
            continue
        print(name, flush=True)
        command = [sys.executable, str(Path(__file__).with_name("train_thinking.py"))]
        subprocess.run([*command, "--task", task, "--kind", kind, "--out", str(out)], check=True)


if __name__ == "__main__":
    main()
