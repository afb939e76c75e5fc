"""Requests of a soak, one per feature, and their right answers.

The oracle's answers are computed from the tokens alone wherever it computes them. The others come from the cluster
before the first fault, and all must be equal to them later.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton import Client
from baton.client.sync import Stream
from baton.client.types import Completion
from baton.core import Sampling, SequenceSpec
from baton.engine.oracle import OracleBackend
from baton.errors import InvalidRequest
from benchmarks.faults.check import THOUGHTS, Answer

WORDS = "the river runs to a wide sea and cities grow on it while rain falls".split()
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CHAT = [{"role": "user", "content": "How is the weather at the river?"}]
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "seeded": {"temperature": 0.8, "ignore_eos": True},
    "deterministic": {"temperature": 0.8, "ignore_eos": True, "deterministic": True},
    "choices": {"temperature": 0.9, "n": 3, "ignore_eos": True},
    "stops": {"temperature": 0.8, "stop": ["e", "xx"], "min_tokens": 8},
    "regex": {"temperature": 0.8, "regex": "[a-z ]{30,60}\\."},
    "schema": {"temperature": 0.8, "json_schema": SCHEMA},
    "tools": {"temperature": 0.8, "tools": [TOOL]},
    "thoughts": {"temperature": 0.0, "ignore_eos": True, "thoughts": True, "think_while_decoding": True},
    "slow reader": {"temperature": 0.0, "ignore_eos": True},
    "cancel": {"temperature": 0.0, "ignore_eos": True},
    "deadline": {"temperature": 0.0, "ignore_eos": True},
}
OVER_HTTP = frozenset({"greedy", "seeded", "deterministic", "choices", "stops", "cancel"})
EXACT = frozenset({"greedy", "seeded", "deterministic", "slow reader", "cancel", "deadline"})


class OracleDiffers(Exception):
    """A quiet cluster gave another answer than the oracle."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request and its right answers by choice."""

    feature: str
    prompt: list[int] | str
    options: dict[str, Any]
    answers: Mapping[int, Answer]

    def send(self, client: Client, timeout: float, **more: Any) -> Stream:
        """Send the request and return its stream."""
        options = {**self.options, **more}
        tools = options.pop("tools", None)
        if tools is not None:
            return client.stream_chat(CHAT, tools=tools, timeout=timeout, **options)
        return client.stream(self.prompt, timeout=timeout, **options)


def with_tools(model: str, folder: Path) -> str:
    """Return a copy of the model in `folder` with a chat template that shows tools, or the model if it has no template.

    The files are links.
    """
    template = Path(model, "chat_template.jinja")
    if not template.is_file():
        return model
    folder.mkdir(exist_ok=True)
    for path in template.parent.iterdir():
        (folder / path.name).unlink(missing_ok=True)
        (folder / path.name).symlink_to(path.resolve())
    (folder / template.name).unlink()
    (folder / template.name).write_text("{% if tools %}{{ tools | tojson }}\n{% endif %}" + template.read_text())
    return str(folder)


def draw_jobs(seed: str, model: str, each: int = 2) -> list[Job]:
    """Draw requests without answers. Those of a trained model are deterministic, because its sums depend on batches."""
    rng, jobs, oracle = random.Random(seed), list[Job](), model == "oracle"
    for feature in (feature for feature in FEATURES for _ in range(each)):
        words = " ".join(rng.choices(WORDS, k=rng.randrange(8, 50)))
        prompt = [rng.randrange(256) for _ in range(rng.randrange(60, 240))] if oracle else words
        options = FEATURES[feature] | {"max_tokens": rng.randrange(60, 240), "seed": rng.randrange(2**63)}
        if not oracle and feature != "thoughts":
            options["deterministic"] = True
        jobs.append(Job(feature, prompt, options, {}))
    return jobs


def answered(jobs: list[Job], client: Client, model: str) -> list[Job]:
    """Return the jobs that this model supports, with their answers. Raises OracleDiffers."""
    found, oracle = list[Job](), OracleBackend() if model == "oracle" else None
    for job in jobs:
        try:
            with closing(job.send(client, 60.0)) as stream:
                answers = _answers(stream.collect(), job)
        except InvalidRequest as error:
            print(f"{job.feature}: left out, because {model} rejects it: {error}", file=sys.stderr)
            continue
        if oracle is not None and job.feature in EXACT:
            _compare(oracle, job, answers[0].tokens)
        found.append(replace(job, answers=answers))
    return found


def _answers(whole: Completion, job: Job) -> dict[int, Answer]:
    found = {n: Answer(one.tokens, one.text, str(one.finish_reason)) for n, one in enumerate(whole.choices)}
    if job.options.get("thoughts"):
        ids = tuple(token for thought in whole.choices[0].thoughts for token in thought.token_ids)
        found[THOUGHTS] = Answer(ids, "", "")
    return found


def _compare(oracle: OracleBackend, job: Job, tokens: tuple[int, ...]) -> None:
    options = {key: value for key, value in job.options.items() if key != "deterministic"}
    right = tuple(oracle.expected(SequenceSpec(tuple(job.prompt), Sampling(**options))))  # type: ignore[arg-type]
    if tokens != right:
        raise OracleDiffers(f"{job}: {tokens} instead of {right}")
