"""OpenAI's client against a whole cluster, and a separate gateway."""

import json
import signal
import urllib.request

import pytest
from openai import OpenAI

from baton.tokenizer import OracleTokenizer
from tests.support.load import oracle_answer
from tests.support.time_factor import scaled

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("oracle")]
NOTHING = {"ignore_eos": True}


def http_client(address, **options):
    return OpenAI(
        base_url=f"http://{address}/v1", api_key="none", **{"max_retries": 0, "timeout": scaled(30), **options}
    )


def test_what_up_prints_works(oracle_cluster):
    lines = (oracle_cluster.home.path / oracle_cluster.name / "up.out").read_text().splitlines()
    curl = next(line.strip() for line in lines if "/v1/completions" in line)
    assert curl.startswith("curl -s http://127.0.0.1:")
    url, body = curl.split()[2], curl.split("-d ")[1].strip("'")
    request = urllib.request.Request(url, body.encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=scaled(30)) as answer:
        assert json.load(answer)["object"] == "text_completion"


def test_a_gateway_alone(oracle_cluster, tmp_path):
    """`baton gateway` in front of a running cluster is stopped during a stream, which still completes."""
    log = tmp_path / "gateway.log"
    with oracle_cluster.home.gateway(oracle_cluster.state().grpc, log) as (process, address):
        asked = {"model": "oracle", "prompt": "hello", "max_tokens": 400, "temperature": 0, "extra_body": NOTHING}
        with http_client(address) as client:
            assert [model.id for model in client.models.list()] == ["oracle"]
            client.completions.create(**asked | {"max_tokens": 1})
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=scaled(30)) as metrics:
                assert b'baton_requests_total{outcome="finished"} 1.0' in metrics.read()
            stream = client.completions.create(**asked, stream=True)
            first = next(stream).choices[0].text
            process.send_signal(signal.SIGTERM)
            text = first + "".join(chunk.choices[0].text for chunk in stream)
            tokens = oracle_answer(b"hello", max_tokens=400, temperature=0.0, ignore_eos=True)
            assert text == OracleTokenizer().decode(tokens)
        process.communicate(timeout=scaled(60))
        assert process.returncode == 0, log.read_text()
