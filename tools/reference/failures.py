"""Part of docs/reference/errors.md: each error with its gRPC status, its HTTP answer and its exit code."""

from __future__ import annotations

from collections.abc import Iterator

from baton import errors
from baton.cli.exit_codes import EXIT_CODES
from baton.errors import BatonError, HandoffError
from baton.rpc.status import CODES
from router.openai.errors import ANSWERS
from tools.reference.commands import exit_codes
from tools.reference.pages import Page, code, table

HEAD = ("error", "meaning", "gRPC status", "HTTP status, `code`", "`retryable`", "exit code")


def page() -> Page:
    """Return the page of errors."""
    return Page("errors.md", {"errors": table(HEAD, map(_row, _kinds())), "exit-codes": exit_codes()})


def _kinds() -> Iterator[type[BatonError]]:
    """Yield the errors in the order of their definition, without those that no client and no command shows."""
    for kind in vars(errors).values():
        shown = isinstance(kind, type) and issubclass(kind, BatonError) and not issubclass(kind, HandoffError)
        if shown and kind is not BatonError:
            yield kind


def _row(kind: type[BatonError]) -> tuple[str, ...]:
    """Return the row of an error. A subclass is sent as its base, where it has no status of its own."""
    sent = next((each for each in kind.__mro__ if each in CODES), None)
    answer = f"{ANSWERS[sent][0]} {code(ANSWERS[sent][2])}" if sent else ""
    exit_code = next((number for number, kinds in EXIT_CODES.items() if issubclass(kind, kinds)), 1)
    text, rpc = " ".join((kind.__doc__ or "").split()), CODES[sent].name if sent else ""
    return code(kind.__name__), text, rpc, answer, "yes" if kind.retryable else "no", str(exit_code)
