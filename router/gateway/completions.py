"""`/v1/completions`: one call per prompt, choices in the order of the prompts."""

from __future__ import annotations

from collections.abc import Sequence

from baton.rpc.v1 import inference_pb2 as pb
from router.gateway.job import Job, Json, base_request, http_name, usage_of
from router.gateway.schema import CompletionBody, Prompt
from router.gateway.texts import Scored


class CompletionShape:
    """Objects of type text_completion."""

    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"

    def choice(self, index: int, text: str, scored: Sequence[Scored] | None, reason: str) -> Json:
        """A whole choice."""
        return _choice(index, text, scored, 0, reason)

    def opening(self, index: int) -> Json | None:
        """There is none."""
        return None

    def piece(self, index: int, text: str, scored: Sequence[Scored] | None, offset: int) -> list[Json]:
        """Some text."""
        return [_choice(index, text, scored, offset, None)]

    def thought(self, index: int, thought: Json) -> Json:
        """A thought, without text."""
        return _choice(index, "", None, 0, None) | {"thoughts": [thought]}

    def ending(self, index: int, reason: str) -> list[Json]:
        """The reason, without text."""
        return [_choice(index, "", None, 0, reason)]


def completion_job(body: CompletionBody) -> Job:
    """What `body` asks for."""
    prompts: list[Prompt] = body.prompt

    def rename(number: int, field: str) -> str:
        here = f"prompt[{number}]" if prompts[1:] else "prompt"
        return http_name(field, {"text": here, "token_ids": here, "prompt": here})

    base = base_request(body, body.max_tokens)
    if body.logprobs is not None:
        base.logprobs = body.logprobs
    return Job(
        requests=[_with_prompt(base, prompt) for prompt in prompts],
        shape=CompletionShape(),
        rename=rename,
        n=body.n or 1,
        stream=bool(body.stream),
        usage=usage_of(body.stream_options),
        thoughts=bool(body.thoughts),
        logprobs=body.logprobs is not None,
    )


def _with_prompt(base: pb.GenerateRequest, prompt: Prompt) -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    request.CopyFrom(base)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
        request.token_ids.SetInParent()
    return request


def _choice(index: int, text: str, scored: Sequence[Scored] | None, offset: int, reason: str | None) -> Json:
    logprobs = None if scored is None else _logprobs(scored, offset)
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(scored: Sequence[Scored], offset: int) -> Json:
    offsets = []
    for each in scored:
        offsets.append(offset)
        offset += len(each.text)
    return {
        "tokens": [each.text for each in scored],
        "token_logprobs": [each.logprob for each in scored],
        "top_logprobs": [_best(each.top) for each in scored],
        "text_offset": offsets,
    }


def _best(top: Sequence[tuple[str, float]]) -> dict[str, float]:
    """By text, which several tokens may share: the likeliest of them."""
    best: dict[str, float] = {}
    for text, logprob in top:
        best.setdefault(text, logprob)
    return best
