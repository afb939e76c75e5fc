"""The gateway of a router with certificates and tokens: HTTPS outside, the cluster's own wire inside."""

from __future__ import annotations

import asyncio
import json
import ssl
import urllib.error
import urllib.request

import pytest

from baton.config.security import TlsConfig
from tests.integration.access_support import TOKENS, token_file


@pytest.fixture
async def cluster(make, folder, tmp_path):
    tls = TlsConfig.model_validate({part: f"{folder}/{part}.pem" for part in ("cert", "key", "ca")})
    return await make(tokens=token_file(tmp_path / "tokens"), tls=tls, http="127.0.0.1:0")


async def post(url, token, ca=None):
    """The status and the body; `ca`: whom to trust."""
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 4}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{url}/v1/completions", body, headers)
    context = ssl.create_default_context(cafile=str(ca)) if ca is not None else None

    def ask():
        try:
            with urllib.request.urlopen(request, timeout=10, context=context) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    return await asyncio.to_thread(ask)


async def test_https_with_a_token(cluster, folder):
    status, body = await post(f"https://{cluster.router.http}", TOKENS["alice"], folder / "ca.pem")
    assert status == 200
    assert body["usage"]["completion_tokens"] == 4
    assert cluster.prefill[0].specs[0].cache_scope.startswith("alice/"), "the tenant comes along"


async def test_a_token_that_nobody_has(cluster, folder):
    status, body = await post(f"https://{cluster.router.http}", "of-nobody-0123456789", folder / "ca.pem")
    assert status == 401
    assert "of-nobody" not in json.dumps(body)
    assert not cluster.prefill[0].specs


async def test_nothing_is_served_in_the_clear(cluster):
    with pytest.raises(OSError):
        await post(f"http://{cluster.router.http}", TOKENS["alice"])


async def test_who_does_not_trust_the_ca_sends_nothing(cluster):
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        await post(f"https://{cluster.router.http}", TOKENS["alice"])
    assert not cluster.prefill[0].specs
