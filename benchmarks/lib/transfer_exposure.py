"""Prompts on the real engine that stream their KV or send it at the end, round by round."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from benchmarks.lib.protocol import ChildFailed
from benchmarks.lib.transfer_figures import Prompt, timeline
from benchmarks.lib.transfer_measure import DEFAULTS, GPU_DEVICES, START_S, ask, schedule

if TYPE_CHECKING:
    from benchmarks.lib.protocol import Answer, Child
    from benchmarks.lib.transfer_measure import Plan, Results, Where

NEVER = 1 << 40  # a `coalesce_below` above any prompt: all KV leaves at the end
SPARE_TOKENS = 256


def measure_prompts(plan: Plan, where: Where, results: Results) -> None:
    """Measure each length over each CPU transport, streamed and in one go."""
    names = [name for name in plan.transports if name not in GPU_DEVICES]
    with where.child("transfer_prefill", where.large, max(plan.prompts) + SPARE_TOKENS) as child:
        child.start(START_S)
        lanes = {(name, on): _lane(child, name, on) for name in names for on in (True, False)}
        for number, tokens, (name, streams) in schedule(plan.prompt_rounds, plan.prompts, list(lanes)):
            _one(child, lanes[name, streams], (name, tokens, streams, number), results)


def _lane(child: Child, transport: str, streams: bool) -> int:
    settings = {"transport": transport, "coalesce_below": DEFAULTS.coalesce_below if streams else NEVER}
    return int(child.ask("open", START_S, settings=settings)["lane"])


def _one(child: Child, lane: int, what: tuple[str, int, bool, int], results: Results) -> None:
    transport, tokens, streams, _ = what
    try:
        answer = ask(child, "prompt", lane=lane, tokens=tokens)
    except ChildFailed as error:
        results.drop(f"{tokens} tokens over {transport}", error)
        return
    prompt = prompt_of(what, answer)
    results.prompts.append(prompt)
    results.raw.append({**asdict(prompt), **answer})
    longest = max(prompt.tokens for prompt in results.prompts)
    if streams and tokens == longest:
        results.timeline = timeline(*(answer[name] for name in ("began", "computed", "announced", "landed")))


def prompt_of(what: tuple[str, int, bool, int], answer: Answer) -> Prompt:
    """Return the sample in an answer of `transfer_prefill`."""
    transport, tokens, streams, number = what
    return Prompt(
        transport=transport,
        tokens=tokens,
        streams=streams,
        round=number,
        ttft_s=answer["ttft_s"],
        exposed_s=answer["exposed_s"],
        round_trip_s=answer["round_trip_s"],
        transfer_s=answer["transfer_s"],
        step_s=answer["step_s"],
        nbytes=answer["kv_bytes"],
        frames=answer["frames"],
    )
