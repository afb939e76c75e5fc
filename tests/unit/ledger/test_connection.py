import pytest

from baton.errors import ConfigError, LedgerError
from baton.ledger.redis_client import Connection, address_of


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
        ("unix://:secret@/run/r.sock?ssl_ca_certs=/ca.pem", "ssl_ca_certs"),
    ],
)
async def test_a_bad_url_is_a_config_error_without_its_password(url, named):
    with pytest.raises(ConfigError, match=named) as caught:
        await Connection.open(url, "baton:test")
    assert "secret" not in str(caught.value)


async def test_a_unix_socket_where_nobody_listens(tmp_path):
    with pytest.raises(LedgerError, match=r"no\.sock"):
        await Connection.open(f"unix://{tmp_path}/no.sock?db=0", "baton:test")
