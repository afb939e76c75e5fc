"""A model by its Hub name, from the local cache and without network: fetched once, served under its name."""

import json

import pytest

from tests.unit.test_hub import COMMIT, snapshot

pytestmark = pytest.mark.slow


def test_a_model_of_the_hub(home, monkeypatch, tmp_path):
    cache = tmp_path / "cache"
    snapshot(cache)
    monkeypatch.setenv("HF_HOME", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with home.cluster("configs/no-ray.yaml", "model.path=hf:org/tiny") as cluster, cluster.client() as client:
        answer = client.generate("The color of dog", model="org/tiny", max_tokens=8, temperature=0)
        assert answer.text == " can vary widely"
        for worker in ("prefill-0", "decode-0"):
            log = (home.path / "no-ray" / "logs" / f"{worker}.log").read_text()
            events = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
            loaded = [event for event in events if event["event"] == "model_loaded"]
            assert [event["model"] for event in loaded] == [f"hf:org/tiny@{COMMIT}"]
