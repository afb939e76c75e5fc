"""Records of workers, and connections to the Redis that stores them."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core import Incarnation, Role, WorkerRef
from baton.errors import ConfigError, LedgerError
from baton.ledger.prefix_directory import WAIT_MS
from baton.ledger.redis_client import READ_S, Connection, address_of
from baton.ledger.registry import worker_from_json, worker_to_json
from tests.support.ledger import info_of

INFO = replace(info_of(Incarnation(1_790_000_000_000_000, 7)), determinism="a" * 24, metrics="127.0.0.1:9101")


def changed(path: str, value: object) -> bytes:
    """Return INFO as JSON with one field set, or removed by `...`."""
    record = json.loads(worker_to_json(INFO))
    *parents, last = path.split(".")
    target = record
    for name in parents:
        target = target[name]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return json.dumps(record).encode()


CANNOT = replace(INFO, determinism="", nondeterminism="not built yet")


@given(
    info=st.sampled_from([INFO, CANNOT]),
    name=st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=40),
    epoch=st.integers(1, 2**53 - 1),
    counter=st.integers(1, 2**53 - 1),
    role=st.sampled_from(Role),
    blocks=st.integers(1, 2**31 - 1),
)
def test_there_and_back(info, name, epoch, counter, role, blocks):
    ref = WorkerRef(name, Incarnation(epoch, counter), "[::1]:1")
    info = replace(info, ref=ref, role=role, total_blocks=blocks)
    assert worker_from_json(worker_to_json(info)) == info


def test_an_older_worker_says_nothing_of_determinism():
    record = json.loads(worker_to_json(INFO))
    del record["determinism"], record["nondeterminism"]
    assert worker_from_json(json.dumps(record).encode()) == replace(INFO, determinism="")


def test_unknown_fields_of_a_newer_worker_are_ignored():
    assert worker_from_json(changed("layout.pages", 3)) == INFO
    assert worker_from_json(changed("zone", "eu")) == INFO


PATHS = [
    *("worker_id", "address", "role", "fingerprint", "model", "max_model_len", "total_blocks", "pid", "host"),
    *("protocol_version", "incarnation", "incarnation.epoch", "incarnation.counter", "layout", "layout.layers"),
    *("layout.kv_heads", "layout.head_dim", "layout.block_size", "layout.dtype", "layout.tensors"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("value", [..., None, -1, 1.5, True, []], ids=repr)
def test_each_field_is_checked_and_named(path, value):
    with pytest.raises(ValueError, match=path):
        worker_from_json(changed(path, value))


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'"x"', b"[" * 100_000, b"\x80\x04K\x01."])
def test_what_is_no_record_at_all_is_refused(raw):
    with pytest.raises(ValueError):
        worker_from_json(raw)


@given(st.binary(max_size=200))
def test_noise_never_raises_anything_else(raw):
    with pytest.raises(ValueError):
        worker_from_json(raw)


def test_errors_do_not_show_the_content():
    with pytest.raises(ValueError) as caught:
        worker_from_json(changed("max_model_len", "secret-content"))
    assert "secret-content" not in str(caught.value)


def test_a_record_that_nobody_would_accept_is_not_written():
    with pytest.raises(ValueError, match="total_blocks"):
        worker_to_json(replace(INFO, total_blocks=0))


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("redis://:s@h:1/0", "h:1"),
        ("redis://h", "h:6379"),
        ("rediss://u:p@[::1]:7/0", "::1:7"),
        ("unix://u:p@/run/r.sock?db=0", "/run/r.sock"),
    ],
)
def test_address_of(url, where):
    assert address_of(url) == where


@pytest.mark.parametrize("prefix", ["", "baton:", ":x", "a*", "a b", "baton:{x}", "a\n"])
async def test_a_prefix_that_a_pattern_could_not_name_is_refused(prefix):
    with pytest.raises(ConfigError, match="prefix"):
        await Connection.open("redis://127.0.0.1:1", prefix)


BAD_URLS = [
    "http://:secret@h/0",
    "redis://:secret@h:port/0",
    "h:6379",
    "",
    "redis://:secret@h?db=x",
    "redis://h:99999",
    *(f"redis://user:secret{sign}secret@host/0" for sign in "/?#"),
    "redis://user:secret@secret@host:x/0",
]


@pytest.mark.parametrize(
    ("url", "named"),
    [
        *((url, "redis") for url in BAD_URLS),
        ("redis://:secret@h?foo=bar", "foo"),
        ("redis://:secret@h?foo=", "foo"),
        ("redis://:secret@h?decode_responses=true", "decode_responses"),  # answers would no longer be bytes
        ("redis://:secret@h?encoding=klingon", "encoding"),
        ("redis://:secret@h?ssl_ca_certs=/ca.pem", "ssl_ca_certs"),  # only for rediss
        ("redis://:secret@h/x", "numeric port and database"),
        ("redis://:secret@h?socket_timeout=x", "redis.url"),
        *((f"redis://h?socket_timeout={wrong}", f"must be above 1 s, got {wrong}") for wrong in ("1", "0.5", "nan")),
        ("unix://:secret@/run/r.sock?ssl_ca_certs=/ca.pem", "ssl_ca_certs"),
    ],
)
async def test_a_bad_url_is_a_config_error_without_its_password(url, named):
    with pytest.raises(ConfigError, match=named) as caught:
        await Connection.open(url, "baton:test")
    assert "secret" not in str(caught.value)


async def test_a_socket_timeout_is_longer_than_each_read():
    assert WAIT_MS / 1000 == READ_S
    with pytest.raises(LedgerError):
        await Connection.open("redis://127.0.0.1:1?socket_timeout=1.5", "baton:test")


async def test_a_unix_socket_where_nobody_listens(tmp_path):
    with pytest.raises(LedgerError, match=r"no\.sock"):
        await Connection.open(f"unix://{tmp_path}/no.sock?db=0", "baton:test")
