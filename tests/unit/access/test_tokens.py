"""The token file: its contents, errors for mistakes, and reloads."""

import asyncio
import hashlib
import hmac
import os
from contextlib import suppress
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from baton.errors import Cancelled, ConfigError, Overloaded, Unauthenticated
from router.auth.tokens import Concurrency, Grant, Limits, Right, TokenFile, read_tokens
from tests.support.waiting import until

ALICE, BOB = "alice-token-0123456789", "bob-token-0123456789"
GOOD = f"""
tokens:
  - token: {ALICE}
    tenant: alice
    limits: {{max_concurrent: 2, max_tokens: 8}}
  - token_sha256: {hashlib.sha256(BOB.encode()).hexdigest()}
    tenant: bob
    role: admin
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tokens.yaml"
    path.write_text(GOOD)
    return path


def test_a_token_or_its_digest(file):
    tokens = read_tokens(file)
    alice, bob = tokens.grant(f"Bearer {ALICE}"), tokens.grant(f"bearer {BOB}")
    assert (alice.tenant, alice.right, alice.limits) == ("alice", Right.USER, Limits(max_concurrent=2, max_tokens=8))
    assert (bob.tenant, bob.right, bob.limits) == ("bob", Right.ADMIN, Limits())
    assert alice.key != bob.key


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", ALICE, f"Basic {ALICE}", f"Bearer {ALICE}x", f"Bearer {ALICE[:-1]}"]
)
def test_anything_else_is_nobody(file, header):
    with pytest.raises(Unauthenticated) as caught:
        read_tokens(file).grant(header)
    assert ALICE not in str(caught.value)


@pytest.mark.parametrize("token", [ALICE, BOB, "of-nobody-0123456789"])
def test_every_entry_is_compared_in_constant_time(file, monkeypatch, token):
    compare = Mock(wraps=hmac.compare_digest)
    monkeypatch.setattr(hmac, "compare_digest", compare)
    with suppress(Unauthenticated):
        read_tokens(file).grant(f"Bearer {token}")
    assert compare.call_count == 2
    assert {len(side) for call in compare.call_args_list for side in call.args} == {32}, "digests hide the length"


SECRET = "s3cret-s3cret-s3cret"
WRONG = {
    "no such file": (None, ["cannot be read"]),
    "not yaml": (f"tokens: [*{SECRET}]", ["not YAML"]),
    "no value of its tag": (f"tokens: [{{token: {SECRET}, tenant: a, role: !!bool {SECRET}}}]", ["not YAML"]),
    "an empty number": (f"tokens: [{{token: {SECRET}, tenant: !!int ''}}]", ["not YAML"]),
    "not text": (b"\xff\xfe\x00" + SECRET.encode(), ["not YAML"]),
    "a token as a key": (f"tokens:\n  {SECRET}: alice", ["tokens", "list"]),
    "an unknown key": (f"tokens: [{{tenant: a, token: {SECRET}, {SECRET}x: 1}}]", ["tokens.0", "unknown key"]),
    "no token": ("tokens: [{tenant: a}]", ["tokens.0", "exactly one of token and token_sha256"]),
    "both": (f"tokens: [{{tenant: a, token: {SECRET}, token_sha256: {'a' * 64}}}]", ["exactly one"]),
    "short": ("tokens: [{tenant: a, token: s3cret}]", ["tokens.0", "16 to 1024"]),
    "with a line break": (f'tokens: [{{tenant: a, token: "{SECRET}\\n"}}]', ["printable ASCII"]),
    "not a digest": (f"tokens: [{{tenant: a, token_sha256: {SECRET}}}]", ["tokens.0.token_sha256"]),
    "no tenant": (f"tokens: [{{token: {SECRET}}}]", ["tokens.0.tenant", "required"]),
    "a tenant with a slash": (f"tokens: [{{token: {SECRET}, tenant: a/b}}]", ["tokens.0.tenant"]),
    "not a role": (f"tokens: [{{token: {SECRET}, tenant: a, role: root}}]", ["tokens.0.role", "'user' or 'admin'"]),
    "no limit": (f"tokens: [{{token: {SECRET}, tenant: a, limits: {{max_tokens: 0}}}}]", ["limits.max_tokens"]),
    "too urgent": (f"tokens: [{{token: {SECRET}, tenant: a, limits: {{priority_max: 101}}}}]", ["priority_max", "100"]),
    "twice": (
        f"tokens: [{{token: {SECRET}, tenant: a}}, {{token: {SECRET}, tenant: b}}]",
        ["tokens.1", "duplicate token"],
    ),
    "empty": ("", ["the file"]),
    "none": ("tokens: []", ["tokens"]),
    "huge": (b"#" * (4 * 2**20 + 1), ["4194304 bytes"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_named_without_the_secret(tmp_path, case):
    text, expected = WRONG[case]
    path = tmp_path / "tokens.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        read_tokens(path)
    for part in ("security.tokens", "tokens.yaml", *expected):
        assert part in str(caught.value)
    assert "s3cret" not in str(caught.value)


def replaced(file, text):
    """Replace the file by another one, as editors and mounted secrets do."""
    other = file.with_suffix(".new")
    other.write_text(text)
    other.replace(file)


async def test_a_file_changed_in_place_within_the_same_size(file):
    tokens = TokenFile(str(file))
    before = file.stat()
    file.write_text(GOOD.replace("tenant: alice", "tenant: carol"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    await tokens.refresh()
    assert tokens.grant(f"Bearer {ALICE}").tenant == "carol"


@pytest.mark.parametrize("broken", ["tokens: [", None])
async def test_a_broken_file_changes_nothing_until_it_is_replaced(file, broken):
    tokens = TokenFile(str(file))
    file.unlink() if broken is None else replaced(file, broken)
    with capture_logs() as lines:
        for _ in range(3):
            await tokens.refresh()
    assert [line["event"] for line in lines] == ["tokens_not_read"], "said once"
    assert tokens.grant(f"Bearer {ALICE}").tenant == "alice"
    replaced(file, GOOD.replace("alice", "dora"))
    await tokens.refresh()
    assert tokens.grant("Bearer dora-token-0123456789").tenant == "dora"
    with pytest.raises(Unauthenticated):
        tokens.grant(f"Bearer {ALICE}")


async def test_the_watch_of_a_file_survives_an_unexpected_error(file, monkeypatch):
    tokens, failures = TokenFile(str(file)), [RuntimeError("can't start new thread")]

    def read(path):
        if failures:
            raise failures.pop()
        return read_tokens(path)

    monkeypatch.setattr("router.auth.tokens.read_tokens", read)
    monkeypatch.setattr("router.auth.tokens.LOOK_S", 0.001)
    replaced(file, GOOD.replace("tenant: alice", "tenant: carol"))
    watch = asyncio.create_task(tokens.watch())
    await until(lambda: tokens.grant(f"Bearer {ALICE}").tenant == "carol", "the next look")
    watch.cancel()
    assert not failures


def test_nothing_secret_is_in_a_repr(file):
    tokens = TokenFile(str(file))
    grant = tokens.grant(f"Bearer {ALICE}")
    for shown in (repr(tokens), repr(grant), repr(read_tokens(file))):
        assert ALICE not in shown
        assert hashlib.sha256(ALICE.encode()).hexdigest() not in shown


# --- concurrent requests of a token


def one_at_a_time(key: str = "a") -> Grant:
    return Grant("tenant", Right.USER, Limits(max_concurrent=1), key)


def test_each_token_has_its_own_places_and_they_come_back():
    counted = Concurrency()
    for _ in range(2):
        with counted.one_more(one_at_a_time("a")), counted.one_more(one_at_a_time("b")):
            with pytest.raises(Overloaded, match="at most 1 concurrent requests"):
                counted.one_more(one_at_a_time("a")).__enter__()
            with counted.one_more(None):
                pass
    assert counted._running == {}


def test_one_that_is_ending_for_another_leaves_its_place_at_once():
    counted = Concurrency()
    reasons: list[Cancelled] = []
    with counted.one_more(one_at_a_time(), lambda: bool(reasons)):
        reasons.append(Cancelled("another call has taken over"))
        with counted.one_more(one_at_a_time()), pytest.raises(Overloaded):
            counted.one_more(one_at_a_time()).__enter__()
    assert counted._running == {}
