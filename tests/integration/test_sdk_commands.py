"""`baton generate`, `chat` and `bench` against a scripted server, as a user runs them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import select
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton import core, errors
from baton.cli import exit_code
from baton.cli.app import app
from baton.rpc import channel, convert
from baton.rpc.status import abort
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import inference_pb2 as inference
from baton.rpc.v1 import inference_pb2_grpc
from tests.integration.test_sdk import Event, Scripted, certificate, soon
from tests.support.time_factor import scaled

ROOT = Path(__file__).parents[2]
FIXTURES = (certificate,)  # of another module: being imported is enough


class Talking(Scripted):
    """Says how many messages it got and the last one; "hang" never ends, "fail" fails."""

    def __init__(self) -> None:
        super().__init__()
        self.hanging = asyncio.Event()
        self.running = self.most = 0
        self.fail_every = 0
        self.together, self.met = 0, asyncio.Event()  # requests wait until so many are there

    async def Generate(self, request: inference.GenerateRequest, context: Any) -> AsyncIterator[Event]:
        self._note(request, context)
        number = len(self.requests)  # read now: more may have come by the time that this one is answered
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self._meet()
            seq = 0
            async for event in self._events(request, context, number):
                numbered = Event(request_id="r1", seq=seq)
                numbered.MergeFrom(event)
                yield numbered
                seq += 1
        finally:
            self.running -= 1

    async def _meet(self) -> None:
        if self.running >= self.together:
            self.met.set()
        await asyncio.wait_for(self.met.wait(), 5)

    async def _events(self, request: inference.GenerateRequest, context: Any, number: int) -> AsyncIterator[Event]:
        said = request.chat.messages[-1].content if request.chat.messages else request.text
        if said == "fail" or (self.fail_every and number % self.fail_every == 0):
            await abort(context, errors.Overloaded("full", retry_after_s=0.01))
        choices = max(1, request.n)
        pieces = [f"{len(request.chat.messages)}:", said, "!"]
        for index, choice in [(index, choice) for index in range(len(pieces)) for choice in range(choices)]:
            token = core.Token(index, 11 + index, pieces[index])
            yield Event(tokens=convert.tokens_to_public_pb([token], choice))
            if said == "hang":
                self.hanging.set()
                await asyncio.Event().wait()
        for choice in range(choices):
            yield Event(finished=inference.Finished(choice=choice, reason=common.FINISH_REASON_EOS))
        usage = inference.Usage(prompt_tokens=len(request.token_ids.ids), completion_tokens=len(pieces) * choices)
        yield Event(completed=inference.Completed(usage=usage))


@contextlib.asynccontextmanager
async def talking(credentials: Any = None) -> AsyncIterator[tuple[Talking, str]]:
    servicer, server = Talking(), channel.aio_server(link=channel.PUBLIC)
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    address = channel.bind(server, "127.0.0.1:0", credentials)
    await server.start()
    try:
        yield servicer, address
    finally:
        await server.stop(None)


@pytest.fixture
async def server() -> AsyncIterator[tuple[Talking, str]]:
    async with talking() as made:
        yield made


async def run(*args: object, text: str | bytes = "") -> Any:
    """`baton ARGS` with `text` on standard input, in this process."""
    return await asyncio.to_thread(CliRunner().invoke, app, [str(arg) for arg in args], input=text)


# generate


async def test_generate_shows_several_answers(server: tuple[Talking, str]):
    done = await run("generate", "hi", "--target", server[1], "--n", 2)
    assert done.stdout == "--- 0\n0:hi!\n--- 1\n0:hi!\n"
    done = await run("generate", "hi", "--target", server[1], "--n", 2, "--json")
    assert [choice["text"] for choice in json.loads(done.stdout)["choices"]] == ["0:hi!"] * 2
    assert (await run("generate", "hi", "--target", server[1])).stdout == "0:hi!\n"


async def test_generate_says_who_it_is(server: tuple[Talking, str], monkeypatch: pytest.MonkeyPatch):
    await run("generate", "hi", "--target", server[1], "--token", "secret")
    assert server[0].metadata["authorization"] == "Bearer secret"
    monkeypatch.setenv("BATON_TOKEN", "other")
    await run("generate", "hi", "--target", server[1])
    assert server[0].metadata["authorization"] == "Bearer other"


async def test_generate_over_tls(certificate: tuple[Path, Path]):
    import grpc

    key, cert = certificate
    async with talking(grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])) as (_, address):
        assert (await run("generate", "hi", "--target", address, "--tls", cert)).stdout == "0:hi!\n"
        failed = await run("generate", "hi", "--target", address, "--tls", "system")
    assert exit_code(failed.exception) == 4
    failed = await run("generate", "hi", "--target", "127.0.0.1:1", "--tls", "/nowhere/ca.pem")
    assert exit_code(failed.exception) == 3


# chat


async def test_a_conversation_on_standard_input(server: tuple[Talking, str]):
    lines = "hi\n\nZoë\n/reset\nagain\n/nothing\n/help\n/etc/hosts is what?\n/exit\nnever\n"
    done = await run("chat", "--target", server[1], "--system", "be kind", "--max-tokens", 9, text=lines)
    assert done.exit_code == 0
    assert done.stdout == "2:hi!\n4:Zoë!\n2:again!\n4:/etc/hosts is what?!\n"
    assert "no command /nothing" in done.stderr
    assert done.stderr.count("begin a new conversation") == 2
    second = server[0].requests[1]
    assert [(turn.role, turn.content) for turn in second.chat.messages] == [
        ("system", "be kind"),
        ("user", "hi"),
        ("assistant", "2:hi!"),
        ("user", "Zoë"),
    ]
    assert second.sampling.max_tokens == 9


async def test_an_error_ends_a_conversation_that_nobody_reads(server: tuple[Talking, str]):
    done = await run("chat", "--target", server[1], text="hi\nfail\nnever\n")
    assert done.stdout == "1:hi!\n"
    assert exit_code(done.exception) == 5
    done = await run("chat", "--target", "127.0.0.1:1", text="hi\n")
    assert exit_code(done.exception) == 4


async def test_what_is_no_text_is_refused_by_name(server: tuple[Talking, str]):
    done = await run("chat", "--target", server[1], text=b"a\xff\n")
    assert isinstance(done.exception, errors.InvalidRequest)
    assert server[0].requests == []


async def chatting(address: str, **streams: Any) -> asyncio.subprocess.Process:
    command = (sys.executable, "-m", "baton", "chat", "--target", address)
    env = {**os.environ, "TERM": "dumb", "NO_COLOR": "1"}
    return await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=env, **streams)


async def test_ctrl_c_ends_the_answer_and_not_the_program(server: tuple[Talking, str]):
    process = await chatting(server[1], stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"hang\n")
    assert await soon(process.stdout.readexactly(2)) == b"1:"
    process.send_signal(signal.SIGINT)
    process.stdin.write(b"hi\n")
    process.stdin.close()
    assert await soon(process.stdout.read()) == b"\n3:hi!\n"
    assert await soon(process.wait()) == 0
    assert [turn.content for turn in server[0].requests[1].chat.messages] == ["hang", "1:", "hi"]


async def test_in_a_terminal_errors_and_ctrl_c_leave_the_conversation(server: tuple[Talking, str]):
    ours, theirs = pty.openpty()
    process = await chatting(server[1], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    screen = b""

    async def until(text: str, again: signal.Signals | None = None) -> None:
        nonlocal screen
        for _ in range(10):
            if text.encode() in screen:
                screen = screen.split(text.encode(), 1)[1]
                return
            readable, _, _ = await asyncio.to_thread(select.select, [ours], [], [], scaled(2))
            if readable:
                screen += os.read(ours, 4096)
            elif again is not None:  # Python takes no notice of a signal just before it waits for a key
                process.send_signal(again)
        raise TimeoutError(f"{text!r} did not come after {screen!r}")

    try:
        await until("> ")
        os.write(ours, b"fail\n")
        await until("Overloaded: full")
        await until("> ")
        os.write(ours, b"hang\n")
        await until("1:")
        process.send_signal(signal.SIGINT)
        await until("ended early")
        await until("> ")
        process.send_signal(signal.SIGINT)
        await until("/exit ends the conversation", again=signal.SIGINT)
        os.write(ours, b"hi\n")
        await until("3:hi!")
        await until("TTFT")
        await until("> ")  # before it the terminal is not readline's yet, and takes Ctrl-D for the end of a line
        os.write(ours, b"\x04")
        assert await soon(process.wait()) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(ours)
