"""`baton generate`: stream one answer from a running cluster."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli import options
from baton.cli.inspect.trace import plain as plain_spans
from baton.cli.inspect.trace import write
from baton.cli.requests.kv import kv_steps, show_kv, texts_of
from baton.errors import ConfigError, EngineFault, InvalidRequest

if TYPE_CHECKING:
    from baton.client import Client, Completion, Delta, Options

SHOWN = ("timings", "tokens", "thoughts", "kv")
STAGES = ("queue", "route", "reserve", "prefill", "transfer", "commit", "decode", "verify")
THINK = "--think-while-decoding/--no-think-while-decoding"
Think = Annotated[
    bool | None,
    typer.Option(
        THINK, help="whether a model with thoughts has them while it decodes (default: as in the cluster file)"
    ),
]


def generate(  # noqa: PLR0913, PLR0917 (each is an option of the command)
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="the prompt; - reads it from standard input")],
    max_tokens: options.MaxTokens = 64,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    seed: options.Seed = None,
    n: Annotated[int, typer.Option("--n", help="number of answers to the prompt, printed when all are complete")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="end the answer before this text; may be repeated")] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="the same answer, bit for bit, under any load")
    ] = False,
    receipt: Annotated[
        Path | None, typer.Option(help="write a signed receipt to this file, with the prompt, for `baton replay`")
    ] = None,
    think_while_decoding: Think = None,
    ttft_ms: Annotated[float | None, typer.Option(help="TTFT to promise; refused within 50 ms otherwise")] = None,
    itl_ms: Annotated[float | None, typer.Option(help="mean time between tokens to promise")] = None,
    model: options.ModelName = "",
    show: Annotated[
        str, typer.Option(help="facts to print after the answer, separated by commas: timings, tokens, thoughts, kv")
    ] = "",
    trace: Annotated[Path | None, typer.Option(help="write the request's trace to this file, for Perfetto")] = None,
    timeout: options.Timeout = 120.0,
    name: options.ClusterName = None,
    target: options.Target = None,
    token: options.Token = None,
    tls: options.Tls = None,
    as_json: options.Json = False,
) -> None:
    """Stream one answer. Set BATON_TOKEN to your token if the cluster has tokens."""
    from baton.cli.target import Router

    request: Options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "n": n}
    request |= {"seed": seed, "stop": stop or [], "deterministic": deterministic or None, "model": model}
    request |= {"think_while_decoding": think_while_decoding, "ttft_ms": ttft_ms, "itl_ms": itl_ms}
    if receipt is not None:
        request["receipt"] = True
    shown = parse_show(show)
    client = Router(name, target, timeout, token, tls).client()
    stream_answer(client, prompt, request, shown, trace, receipt, as_json=as_json)


def parse_show(text: str) -> set[str]:
    """Parse `--show a,b`. Raises InvalidRequest with the unknown name."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in SHOWN:
            raise InvalidRequest.of("--show", f"{name!r} is not one of {', '.join(SHOWN)}")
    return set(names)


def stream_answer(
    client: Client,
    prompt: str,
    request: Options,
    shown: Collection[str],
    trace: Path | None = None,
    receipt: Path | None = None,
    *,
    as_json: bool,
) -> None:
    """Print the answer as it arrives, and write its trace and its receipt to these files. Raises BatonError."""
    # As in an argument: invalid UTF-8 is rejected later with a named error, without a traceback here.
    text = sys.stdin.buffer.read().decode(errors="surrogateescape") if prompt == "-" else prompt
    streamed = not as_json and request.get("n") in {None, 1}  # several answers are printed at the end
    request = {**request, **facts(shown)}
    if trace is not None:
        request = {**request, "trace": True}
    texts = dict[tuple[int, int], str]()
    with client, client.stream(text, **request) as stream:
        for delta in stream:
            texts.update(texts_of(delta))
            if delta.thoughts and not as_json:
                print_thoughts(delta, stream.text if streamed else "")
            elif streamed:
                typer.echo(delta.text, nl=False)
                sys.stdout.flush()
        completion = stream.collect()
        if receipt is not None:
            from baton.receipts.form import with_prompt

            signed = with_prompt(completion.receipt, client.tokenize(text)) + "\n"
            try:
                receipt.write_text(signed, encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"--receipt: cannot write {receipt}: {error.strerror}") from None
    if trace is not None:
        write(trace, completion.trace, completion.request_id, completion.trace_id)
    if as_json:
        steps = {"kv": list(map(dataclasses.asdict, kv_steps(completion)))} if "kv" in shown else {}
        typer.echo(json.dumps(plain(completion) | steps))
        return
    numbered = (f"--- {number}\n{choice.text}" for number, choice in enumerate(completion.choices))
    typer.echo("" if streamed else "\n".join(numbered))
    describe(completion, shown)
    if "kv" in shown:
        show_kv(completion, texts)


def facts(shown: Collection[str]) -> Options:
    """Return the request fields for these names of `--show`."""
    found: Options = {}
    if "thoughts" in shown:
        found["thoughts"] = True
    if "kv" in shown:
        found["kv_lengths"] = True
    return found


def plain(completion: Completion) -> dict[str, object]:
    """Return an answer for JSON. `matched_stop` is a token id, a text, or null."""
    tree = dataclasses.asdict(completion)
    for choice in tree["choices"]:
        matched, by_token = choice["matched_stop"] or None, choice["finish_reason"] in {"eos", "stop_token"}
        choice["matched_stop"] = int(matched) if matched and by_token else matched
    return tree | {"trace": plain_spans(completion.trace)}


def print_thoughts(delta: Delta, before: str) -> None:
    """Print thoughts on standard error, each on its own line; `before` is the text already on the line."""
    for thought in delta.thoughts:
        begin = "\n" if before and not before.endswith("\n") else ""
        whose = f"answer {delta.choice}, " if delta.choice else ""
        content = thought.text or " ".join(map(str, thought.token_ids)) or "-"
        typer.echo(f"{begin}{whose}chunk {thought.chunk}: {content}", err=True)


def describe(completion: Completion, shown: Collection[str]) -> None:
    """Print the facts that `--show` requests."""
    if completion.finish_reason is None:
        raise EngineFault("the stream ended without a reason")
    if "tokens" in shown:
        ids = " ".join(map(str, completion.tokens))
        typer.echo(f"tokens    {len(completion.tokens)} ({ids}), ended by {completion.finish_reason.value}")
        typer.echo(f"prompt    {completion.usage.prompt_tokens} tokens, {completion.usage.cached_tokens} cached")
        if completion.usage.thinking_tokens:
            typer.echo(f"thoughts  {completion.usage.thinking_tokens} tokens")
    if "timings" in shown:
        typer.echo(f"placement {placed(completion)}")
        values = dataclasses.asdict(completion.timings)
        stages = [stage for stage in STAGES if stage != "verify" or values["verify_s"]]
        typer.echo("stages    " + ", ".join(f"{stage} {values[f'{stage}_s'] * 1e3:.1f}" for stage in stages) + " ms")
        typer.echo(f"latency   {latency(completion)}, end to end {values['e2e_s'] * 1e3:.1f} ms")
        if completion.system_fingerprint:
            typer.echo(f"system    {completion.system_fingerprint}")
        if completion.usage.audit_digest:
            typer.echo(f"audit     {completion.usage.audit_digest}")


def placed(completion: Completion) -> str:
    """Return which worker did which part."""
    placement = completion.placement
    if not placement.decode_worker:
        return f"prefill on {placement.prefill_worker}; its first token ended the answer, so no handoff took place"
    if placement.prefill_worker == placement.decode_worker:
        return f"prefill and decode on {placement.decode_worker}; no KV was moved"
    if not placement.prefill_worker:
        return f"decode on {placement.decode_worker}, begun at another router"
    moved = f"{placement.kv_bytes:,} bytes of KV over {placement.transport}"
    return f"prefill on {placement.prefill_worker} -> {moved} -> decode on {placement.decode_worker}"


def latency(completion: Completion) -> str:
    """Return TTFT, and the mean time between the tokens after the first, if the answer has any."""
    timings, count = completion.timings, len(completion.tokens)
    if not any(choice.tokens for choice in completion.choices):
        return "no token"
    text = f"TTFT {timings.ttft_s * 1e3:.1f} ms"
    if count > 1:
        text += f", ITL {(timings.e2e_s - timings.ttft_s) / (count - 1) * 1e3:.1f} ms"
    return text
