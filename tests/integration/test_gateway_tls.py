"""The gateway of a router with certificates and tokens: HTTPS outside, the cluster's own wire inside."""

from __future__ import annotations

import ssl

import openai
import pytest

from tests.integration.access_support import TOKENS, tls_of, token_file
from tests.integration.gateway_support import client_of, refused


@pytest.fixture
async def cluster(make, folder, tmp_path):
    return await make(tokens=token_file(tmp_path / "tokens"), tls=tls_of(folder), http="127.0.0.1:0")


@pytest.fixture
def trusting(folder):
    return ssl.create_default_context(cafile=folder / "ca.pem")


async def ask(cluster, verify, token=TOKENS["alice"]):
    async with client_of(cluster.router.http, token, verify) as client:
        return await client.completions.create(model="oracle", prompt=[1, 2, 3], max_tokens=4)


async def test_https_with_a_token(cluster, trusting):
    done = await ask(cluster, trusting)
    assert done.usage.completion_tokens == 4
    assert cluster.prefill[0].specs[0].cache_scope.startswith("alice/"), "the tenant comes along"


async def test_a_token_that_nobody_has(cluster, trusting):
    failed = await refused(openai.AuthenticationError, ask(cluster, trusting, "of-nobody-0123456789"))
    assert "of-nobody" not in failed.response.text
    assert not cluster.prefill[0].specs


@pytest.mark.parametrize(("verify", "why"), [(None, ""), (ssl.create_default_context(), "CERTIFICATE_VERIFY_FAILED")])
async def test_nothing_is_served_in_the_clear_or_to_who_does_not_trust_the_ca(cluster, verify, why):
    failed = await refused(openai.APIConnectionError, ask(cluster, verify))
    assert why in str(failed.__cause__)
    assert not cluster.prefill[0].specs
