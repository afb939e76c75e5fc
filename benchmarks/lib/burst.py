"""HTTP requests that all begin at the same time, each on its own connection, and how each one ended."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field

from baton.network import raise_open_files
from benchmarks.lib.report import markdown

PROMPT, ANSWER = 16, 16  # tokens
USAGE = {"stream_options": {"include_usage": True}}
_WITHIN_S = 120.0  # a request that takes longer counts as lost


@dataclass
class Burst:
    """Results of one burst. Times are from the begin of a request's connect, in seconds."""

    answered: list[float] = field(default_factory=list)  # time to the first byte
    refused: list[float] = field(default_factory=list)  # time to the whole refusal
    without_delay: int = 0  # refusals without Retry-After
    ends: Counter[str] = field(default_factory=Counter)  # of all requests: status, or how it was lost

    @property
    def lost(self) -> int:
        return self.ends.total() - len(self.answered) - len(self.refused)


async def burst(address: str, count: int, model: str) -> Burst:
    """Send `count` streaming requests, with `model` if it is not empty."""
    raise_open_files()
    found = Burst()
    await asyncio.gather(*(_ask(address, _request(number, model), found) for number in range(count)))
    return found


def _request(number: int, model: str) -> bytes:
    prompt = [(number * 31 + at) % 256 for at in range(PROMPT)]
    body = {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "stream": True, **USAGE}
    data = json.dumps(body | ({"model": model} if model else {})).encode()
    head = f"content-type: application/json\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
    return f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{head}".encode() + data


async def _ask(address: str, request: bytes, found: Burst) -> None:
    began = time.monotonic()
    try:
        async with asyncio.timeout(_WITHIN_S):
            reader, writer = await asyncio.open_connection(*address.split(":"))
            writer.write(request)
            first = await reader.read(1)
            first_s = time.monotonic() - began
            answer = first + await reader.read()
            writer.close()
    except (OSError, TimeoutError) as error:
        found.ends[type(error).__name__] += 1
        return
    _count(answer, first_s, time.monotonic() - began, found)


def _count(answer: bytes, first_s: float, whole_s: float, found: Burst) -> None:
    head = answer.partition(b"\r\n\r\n")[0].lower()
    status = head.split(b" ")[1].decode() if head.startswith(b"http/1.1 ") else "no answer"
    if status == "200":
        whole = f'"completion_tokens":{ANSWER},'.encode() in answer and b"data: [DONE]" in answer
        found.ends["200" if whole else "200 incomplete"] += 1
        if whole:
            found.answered.append(first_s)
    elif status in {"429", "503"}:
        found.ends[status] += 1
        found.refused.append(whole_s)
        found.without_delay += b"\r\nretry-after:" not in head
    else:
        found.ends[status] += 1


def _at(values: list[float], share: float) -> str:
    return f"{sorted(values)[min(int(len(values) * share), len(values) - 1)]:.2f} s" if values else "-"


def table(bursts: dict[str, Burst]) -> str:
    """Return one line per burst."""
    header = [
        "body",
        "answered",
        "refused",
        "no Retry-After",
        "lost",
        "first byte p50",
        "p99",
        "refusal p50",
        "p99",
        "max",
    ]
    return markdown(
        header,
        [
            [
                name, str(len(one.answered)), str(len(one.refused)), str(one.without_delay), str(one.lost),
                _at(one.answered, 0.5), _at(one.answered, 0.99),
                *(_at(one.refused, share) for share in (0.5, 0.99, 1.0)),
            ]
            for name, one in bursts.items()
        ],
    )  # fmt: skip
