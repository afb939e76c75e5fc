"""`baton bench --http`: what it reads of a server's answer."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from baton.cli.bench.http import HttpServer
from baton.cli.bench.plan import Ask
from baton.cli.bench.sample import Sample
from baton.clock import SystemClock
from baton.errors import ConfigError


def asking(port: int, token: str | None = None) -> HttpServer:
    return HttpServer(f"http://127.0.0.1:{port}", {}, SystemClock(), 10.0, token, None)


@pytest.mark.parametrize("token", ["schl\u00fcssel", "\u2713", "two\nlines"])
def test_a_token_that_no_header_can_carry(token: str):
    with pytest.raises(ConfigError, match="token: must be printable ASCII without line breaks"):
        asking(1, token)


async def test_a_chunk_without_text_counts_as_none():
    def of(text: str, reason: str | None = None) -> dict[str, Any]:
        return {"choices": [{"text": text, "finish_reason": reason}]}

    usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 4}}
    chunks = [of(""), of("a"), of(""), of("b"), of("", "stop"), usage]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        length = re.search(rb"content-length: (\d+)", (await reader.readuntil(b"\r\n\r\n")).lower())
        assert length is not None
        await reader.readexactly(int(length[1]))
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(f"{head}{body}".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        http, sample = asking(server.sockets[0].getsockname()[1]), Sample(0.0)
        await http.send(Ask("x", 4), sample)
        await http.close()
    assert (sample.counts, sample.tokens) == ([1, 1], 4)
