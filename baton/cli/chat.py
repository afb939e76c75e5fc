"""`baton chat`: a conversation in a terminal, or of the lines on standard input."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Protocol

import typer

from baton.client import ChatMessage, Client, Completion, Options
from baton.errors import BatonError

COMMANDS = {
    "/reset": "begin a new conversation",
    "/exit": "end; so does Ctrl-D",
    "/help": "show this; Ctrl-C ends an answer",
}


class Conversation:
    """The turns so far. A turn counts once something was answered, also when it was ended early."""

    def __init__(self, client: Client, options: Options, system: str = "") -> None:
        self._client = client
        self._options = options
        self._first = [ChatMessage("system", system)] if system else []
        self.messages = list(self._first)

    def reset(self) -> None:
        """Forget the turns."""
        self.messages = list(self._first)

    def turn(self, text: str, write: Callable[[str], None]) -> Completion | None:
        """Ask, and `write` the answer as it comes; None if Ctrl-C ended it. Raises BatonError."""
        asked, said, done = ChatMessage("user", text), "", None
        try:
            with self._client.stream_chat([*self.messages, asked], **self._options) as stream:
                for delta in stream:
                    said += delta.text
                    write(delta.text)
                done = stream.collect()
        except KeyboardInterrupt:  # leaving the block has cancelled the request
            pass
        if said:
            self.messages += [asked, ChatMessage("assistant", said)]
        return done


class Screen(Protocol):
    """Where a conversation takes place."""

    lasting: bool
    """Whether it goes on after an error."""

    def read(self) -> str | None:
        """What the user says; None at the end."""

    def write(self, text: str) -> None:
        """A part of an answer."""

    def end(self, done: Completion | None) -> None:
        """An answer has ended; None: early."""

    def note(self, text: str) -> None:
        """Something beside the conversation."""


class Pipe:
    """Each line of standard input is a turn, answers go to standard output."""

    lasting = False

    def read(self) -> str | None:
        # As in an argument: what is not UTF-8 is refused by name later, and not a traceback here.
        line = sys.stdin.buffer.readline().decode(errors="surrogateescape")
        return line.rstrip("\r\n") if line else None

    def write(self, text: str) -> None:
        typer.echo(text, nl=False)
        sys.stdout.flush()

    def end(self, done: Completion | None) -> None:
        typer.echo("")

    def note(self, text: str) -> None:
        typer.echo(text, err=True)


class Terminal:
    """A person at a keyboard, with the lines of this conversation on the arrow keys; nothing is kept on disk."""

    lasting = True

    def __init__(self) -> None:
        import readline  # noqa: F401 (gives input() its arrow keys)

        from rich.console import Console

        self._console = Console(highlight=False, markup=False, soft_wrap=True)

    def read(self) -> str | None:
        try:
            return input("> ")
        except EOFError:
            return None
        except KeyboardInterrupt:
            self.note("\nCtrl-D or /exit ends the conversation")
            return ""

    def write(self, text: str) -> None:
        self._console.print(text, end="")

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


def chat(client: Client, options: Options, system: str) -> None:
    """Talk until the user ends it. Raises BatonError when nobody is there to read an error."""
    screen = Terminal() if sys.stdin.isatty() and sys.stdout.isatty() else Pipe()
    with client:
        talk(Conversation(client, options, system), screen)


def talk(conversation: Conversation, screen: Screen) -> None:
    """One turn after the other."""
    while (line := screen.read()) is not None:
        if line.strip() == "/exit":
            return
        if re.fullmatch(r"/\w+", line.strip()):
            screen.note(command(conversation, line.strip()))
        elif line.strip():
            answer(conversation, screen, line)


def command(conversation: Conversation, name: str) -> str:
    """Do what a line with a slash asks; what to tell the user."""
    if name == "/reset":
        conversation.reset()
        return "a new conversation"
    known = "\n".join(f"{name:<8}{does}" for name, does in COMMANDS.items())
    return known if name == "/help" else f"no command {name}; there are\n{known}"


def answer(conversation: Conversation, screen: Screen, text: str) -> None:
    """One turn; an error ends it, and the conversation too unless the screen lasts."""
    try:
        screen.end(conversation.turn(text, screen.write))
    except BatonError as error:
        if not screen.lasting:
            raise
        screen.note(f"\n{type(error).__name__}: {error}")
