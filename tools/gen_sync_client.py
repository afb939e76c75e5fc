"""Generate the blocking client, `baton/client/sync.py`, from the asyncio one, `baton/client/aio.py`.

    python tools/gen_sync_client.py             # write it (`make fmt` does)
    python tools/gen_sync_client.py --check     # is the committed file the one that the asyncio client gives?

Tokens are dropped (`async`, `await`) and renamed; docstrings that would not read well so have a text of their own in
DOCS. The code that really differs (gRPC's two APIs, threads, sleeping) is written by hand: `_transport_{aio,sync}.py`.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENT = Path("baton/client")
FILES = {"aio.py": "sync.py"}
DROPPED = {"async", "await"}
NAMES = {
    "AsyncClient": "Client",
    "AsyncStream": "Stream",
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "_transport_aio": "_transport_sync",
    "aio": "sync",
}
HEADER = "# Generated from {source} by tools/gen_sync_client.py; do not edit.\n"
DOCS = {
    "aio.py": "The blocking client. `_retry`, `_messages` and `_accumulator` make the decisions.",
    "AsyncClient": """A connection to a router, for any number of threads.

    >>> from baton import Client
    >>> with Client(target) as client:
    ...     answer = client.generate("The color of dog", max_tokens=8, temperature=0)
    ...     ids = client.tokenize("dog")
    ...     text = client.detokenize(ids)
    >>> answer.text, answer.finish_reason.value, answer.usage.completion_tokens
    (' can vary widely', 'eos', 3)
    >>> text
    'dog'

    An unknown option raises TypeError before anything is sent. A rejection by the server raises a typed error.

    >>> with Client(target) as client:
    ...     client.generate("The color of dog", max_token=8)
    Traceback (most recent call last):
    TypeError: unknown option 'max_token'; did you mean 'max_tokens'?

    `target` is the router's `host:port`, or a comma-separated list; if one cannot be reached, the next one is tried.
    `token` is sent as bearer token. `tls` is a CA file, its bytes, or a folder of `baton certs`. `timeout` limits each
    call in seconds, retries included. A call is retried at most `max_retries` times if that can help, after the
    server's retry delay plus a random one. `admin` is the address for `cluster`. The constructor raises ConfigError,
    methods raise the errors of `baton.errors`.
    """,
    "AsyncStream": """\
An answer in progress: iterate over its `Delta`s. Leaving the `with` block cancels it.

    >>> with Client(target) as client, client.stream("The color of dog", temperature=0) as stream:
    ...     for delta in stream:
    ...         print(delta.text, end="|")
    ...
     can| vary| widely|
    >>> stream.text, stream.usage.completion_tokens
    (' can vary widely', 3)

    If the connection is lost, a resumable request (`resumable_s`) continues there or at the client's next router. No
    text is repeated or lost. `resumed` counts these breaks.
    """,
}


def docstrings(source: str, name: str) -> dict[int, str]:
    """The lines at which a docstring of DOCS takes the place of one of `source`, the file called `name`."""
    tree = ast.parse(source)
    named: Iterator[tuple[str, ast.Module | ast.ClassDef]] = (
        (node.name, node) for node in tree.body if isinstance(node, ast.ClassDef)
    )
    return {node.body[0].lineno: DOCS[key] for key, node in [(name, tree), *named] if key in DOCS}


def blocking(source: str, name: str) -> str:
    """The blocking client's code for `source`, the file called `name` of the asyncio client. Not formatted yet."""
    documents = docstrings(source, name)
    lines, dropped = source.splitlines(keepends=True), []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = replacement(token, documents)
        if text is not None:
            dropped.append((token.start, token.end, text))
    for (row, column), (last_row, last_column), text in reversed(dropped):
        rest = lines[last_row - 1][last_column:]
        rest = rest.lstrip(" ") if not text else rest
        lines[row - 1 : last_row] = [lines[row - 1][:column] + text + rest]
    return HEADER.format(source=CLIENT / name) + "".join(lines)


def replacement(token: tokenize.TokenInfo, documents: dict[int, str]) -> str | None:
    """Return the text that replaces `token`, or None if it stays."""
    if token.type == tokenize.STRING and token.start[0] in documents and token.string.startswith('"""'):
        return f'"""{documents[token.start[0]]}"""'
    if token.type == tokenize.STRING and token.string.startswith('"""'):
        return re.sub(r"\basync (for|with)\b", r"\1", token.string)
    if token.type != tokenize.NAME:
        return None
    return "" if token.string in DROPPED else NAMES.get(token.string)


def formatted(code: str) -> str:
    """`code` with its imports sorted, as `make fmt` leaves it."""
    ruff = Path(sys.executable).parent / "ruff"
    name = f"--stdin-filename={CLIENT / 'generated.py'}"
    for arguments in (["check", "-q", "--fix-only", "--select=I", name, "-"], ["format", "-q", name, "-"]):
        command = [str(ruff), *arguments]
        code = subprocess.run(command, input=code, text=True, capture_output=True, check=True, cwd=ROOT).stdout
    return code


def generated() -> dict[Path, str]:
    """The text that each generated file must have."""
    folder = ROOT / CLIENT
    return {folder / made: formatted(blocking((folder / name).read_text(), name)) for name, made in FILES.items()}


def stale() -> list[Path]:
    """The files that are not what the asyncio client gives now."""
    return [path for path, text in generated().items() if not path.exists() or path.read_text() != text]


def main() -> int:
    """Parse the command line and do what it asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    if not parser.parse_args().check:
        for path, text in generated().items():
            path.write_text(text)
        return 0
    old = stale()
    for path in old:
        print(f"{path.relative_to(ROOT)} is stale, run: python tools/gen_sync_client.py", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
