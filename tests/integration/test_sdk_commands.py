"""`baton generate` and `baton chat` against a scripted server, as a user runs them."""

import asyncio
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

from baton import errors
from baton.cli.exit_codes import exit_code
from baton.cli.requests.chat import Terminal
from baton.rpc.channel import Wire
from tests.support.clients import Talking, run, serving, soon
from tests.support.time_factor import scaled

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def server() -> AsyncIterator[Talking]:
    async with serving(Talking()) as made:
        yield made


async def generate(target: str, *args: object) -> Any:
    return await run("generate", "hi", "--target", target, *args)


async def test_generate_shows_several_answers(server: Talking):
    assert (await generate(server.address, "--n", 2)).stdout == "--- 0\n0:hi!\n--- 1\n0:hi!\n"
    done = await generate(server.address, "--n", 2, "--json")
    assert [choice["text"] for choice in json.loads(done.stdout)["choices"]] == ["0:hi!"] * 2
    assert (await generate(server.address)).stdout == "0:hi!\n"


async def test_generate_sends_the_token(server: Talking, monkeypatch: pytest.MonkeyPatch):
    await generate(server.address, "--token", "secret")
    assert server.metadata["authorization"] == "Bearer secret"
    monkeypatch.setenv("BATON_TOKEN", "other")
    await generate(server.address)
    assert server.metadata["authorization"] == "Bearer other"


async def test_generate_over_tls(folder: Path):
    async with serving(Talking(), Wire.of_path(folder).public) as server:
        assert (await generate(server.address, "--tls", folder / "ca.pem")).stdout == "0:hi!\n"
        failed = await generate(server.address, "--tls", "system")
    assert exit_code(failed.exception) == 4
    failed = await generate("127.0.0.1:1", "--tls", "/nowhere/ca.pem")
    assert exit_code(failed.exception) == 3


async def test_a_conversation_on_standard_input(server: Talking):
    lines = "hi\n\nZoë\n/reset\nagain\n/nothing\n/help\n/etc/hosts is what?\n/exit\nnever\n"
    done = await run("chat", "--target", server.address, "--system", "be kind", "--max-tokens", 9, text=lines)
    assert done.exit_code == 0
    assert done.stdout == "2:hi!\n4:Zoë!\n2:again!\n4:/etc/hosts is what?!\n"
    assert "unknown command /nothing" in done.stderr
    assert done.stderr.count("begin a new conversation") == 2
    second = server.requests[1]
    turns = [("system", "be kind"), ("user", "hi"), ("assistant", "2:hi!"), ("user", "Zoë")]
    assert [(turn.role, turn.content) for turn in second.chat.messages] == turns
    assert second.sampling.max_tokens == 9


async def test_an_error_ends_a_conversation_that_nobody_reads(server: Talking):
    done = await run("chat", "--target", server.address, text="hi\nfail\nnever\n")
    assert done.stdout == "1:hi!\n"
    assert exit_code(done.exception) == 5
    done = await run("chat", "--target", "127.0.0.1:1", text="hi\n")
    assert exit_code(done.exception) == 4


async def test_what_is_no_text_is_refused_by_name(server: Talking):
    done = await run("chat", "--target", server.address, text=b"a\xff\n")
    assert isinstance(done.exception, errors.InvalidRequest)
    assert server.requests == []


def test_a_terminal_shows_the_exact_text(capsys: pytest.CaptureFixture[str]):
    screen = Terminal()
    screen.write(":100:\t[b]x")
    screen.note(":100:")
    assert capsys.readouterr().out == ":100:\t[b]x:100:\n"


async def chatting(address: str, **streams: Any) -> asyncio.subprocess.Process:
    command = (sys.executable, "-m", "baton", "chat", "--target", address)
    env = {**os.environ, "TERM": "dumb", "NO_COLOR": "1"}
    return await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=env, **streams)


async def test_ctrl_c_ends_the_answer_and_not_the_program(server: Talking):
    process = await chatting(server.address, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"hang\n")
    assert await soon(process.stdout.readexactly(2)) == b"1:"
    process.send_signal(signal.SIGINT)
    process.stdin.write(b"hi\n")
    process.stdin.close()
    assert await soon(process.stdout.read()) == b"\n3:hi!\n"
    assert await soon(process.wait()) == 0
    assert [turn.content for turn in server.requests[1].chat.messages] == ["hang", "1:", "hi"]


async def test_in_a_terminal_errors_and_ctrl_c_leave_the_conversation(server: Talking):
    ours, theirs = pty.openpty()
    process = await chatting(server.address, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
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
            elif again is not None:  # Python ignores a signal that comes just before it waits for a key
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
        await until("> ")  # before that, readline does not read the terminal: Ctrl-D would end a line
        os.write(ours, b"\x04")
        assert await soon(process.wait()) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(ours)
