"""`baton chat`: a conversation in a terminal, or with lines of standard input."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli import options
from baton.errors import BatonError

if TYPE_CHECKING:
    from baton.client import Client, Completion, Options

COMMANDS = {
    "/reset": "begin a new conversation",
    "/exit": "end the conversation, like Ctrl-D",
    "/help": "show this help; Ctrl-C ends an answer",
}


def chat(  # noqa: PLR0913, PLR0917 (each is an option of the command)
    system: Annotated[str, typer.Option(help="the system message")] = "",
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    seed: options.Seed = None,
    model: options.ModelName = "",
    timeout: options.Timeout = 120.0,
    name: options.ClusterName = None,
    target: options.Target = None,
    token: options.Token = None,
    tls: options.Tls = None,
) -> None:
    """Chat with the model. Ctrl-C ends an answer, Ctrl-D or /exit ends the conversation, /reset begins a new one."""
    from baton.cli.target import Router

    request: Options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    request |= {"seed": seed, "model": model}
    with Router(name, target, timeout, token, tls).client() as client:
        screen = Terminal() if sys.stdin.isatty() and sys.stdout.isatty() else Screen()
        talk(Conversation(client, request, system), screen)


class Conversation:
    """The turns so far. A turn counts if it has any answer, even one that was stopped early."""

    def __init__(self, client: Client, options: Options, system: str = "") -> None:
        self._client = client
        self._options = options
        self._first = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        self._messages = list(self._first)

    def turn(self, text: str, write: Callable[[str], None]) -> Completion | None:
        """Send a message and `write` the answer as it arrives. Returns None if Ctrl-C stopped it. Raises BatonError."""
        question, reply, done = {"role": "user", "content": text}, "", None
        try:
            with self._client.stream_chat([*self._messages, question], **self._options) as stream:
                for delta in stream:
                    reply += delta.text
                    write(delta.text)
                done = stream.collect()
        except KeyboardInterrupt:  # leaving the block has cancelled the request
            pass
        if reply:
            self._messages += [question, {"role": "assistant", "content": reply}]
        return done


class Screen:
    """Standard input and output: each input line is a turn. An error ends the conversation."""

    survives_errors = False

    def read(self) -> str | None:
        # As in an argument: invalid UTF-8 is rejected later with a named error, without a traceback here.
        line = sys.stdin.buffer.readline().decode(errors="surrogateescape")
        return line.rstrip("\r\n") if line else None

    def write(self, text: str) -> None:
        typer.echo(text, nl=False)
        sys.stdout.flush()

    def end(self, done: Completion | None) -> None:
        """End an answer; `done` is None if it was stopped early."""
        typer.echo("")

    def note(self, text: str) -> None:
        typer.echo(text, err=True)


class Terminal(Screen):
    """A terminal. Arrow keys recall lines of this conversation; nothing is stored on disk."""

    survives_errors = True

    def __init__(self) -> None:
        import readline  # noqa: F401 (gives input() its arrow keys)

        from rich.console import Console

        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)

    def read(self) -> str | None:
        try:
            return input("> ")
        except EOFError:
            return None
        except KeyboardInterrupt:
            self.note("\nCtrl-D or /exit ends the conversation")
            return ""

    def end(self, done: Completion | None) -> None:
        self._console.print("")
        if done is None:
            self.note("ended early")
        else:
            tokens, timings = len(done.tokens), done.timings
            ttft = f", TTFT {timings.ttft_s * 1e3:.0f} ms" if tokens else ""
            self.note(f"{tokens} tokens{ttft}, end to end {timings.e2e_s:.2f} s")

    def note(self, text: str) -> None:
        self._console.print(text, style="dim")


def talk(conversation: Conversation, screen: Screen) -> None:
    """Run one turn after the other."""
    while (line := screen.read()) is not None:
        if line.strip() == "/exit":
            return
        if re.fullmatch(r"/\w+", line.strip()):
            screen.note(command(conversation, line.strip()))
        elif line.strip():
            answer(conversation, screen, line)


def command(conversation: Conversation, name: str) -> str:
    """Execute a line with a slash, and return the text to show."""
    if name == "/reset":
        conversation.reset()
        return "a new conversation"
    known = "\n".join(f"{name:<8}{does}" for name, does in COMMANDS.items())
    return known if name == "/help" else f"unknown command {name}; the commands are\n{known}"


def answer(conversation: Conversation, screen: Screen, text: str) -> None:
    """Run one turn. An error ends it, and also the conversation unless the screen survives errors."""
    try:
        screen.end(conversation.turn(text, screen.write))
    except BatonError as error:
        if not screen.survives_errors:
            raise
        screen.note(f"\n{type(error).__name__}: {error}")
