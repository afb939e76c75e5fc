"""Mistakes in values, in templates and in the cluster file are caught with helpful messages."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError
from tests.helm.checks import (
    check_budgets,
    check_hardening,
    check_probes,
    check_references,
    check_secrets,
    check_selectors,
    load,
)
from tests.helm.conftest import CHART, MINIMAL, Helm, Schemas
from tests.helm.metric_names import unknown_metrics

FORM = {  # arguments of `--set`, and the start of the error by values.schema.json
    "decode.replica=2": "replica",
    "config.decode.max_runing=2": "max_runing",
    "decode.sharedMemory=much": "sharedMemory",
    "image.digest=1234": "digest",
    "image.pullPolicy=Sometimes": "pullPolicy",
    "prefill.gpus=-1": "gpus",
}
MEANING = {  # the same for templates/validate.yaml
    "image.repository=": "image.repository: must be set",
    "redis.external.host=other": 'redis.external.host: "other" contradicts redis.install: true',
    "model.pvc.create=true,model.existingClaim=models": "model.pvc.create: must be false if model.existingClaim",
    "prefill.replicas=0": "prefill.replicas: must be at least 1 unless config.mode is colocated, got 0",
    "config.router.grpc=a:1": "config.router.grpc: the chart sets this key; use router.service.grpcPort",
    "config.router.metrics=a:1": "config.router.metrics: the chart sets this key; the port is 9100",
    "config.redis.url=redis://a": "config.redis: the chart sets this key; use redis.external",
    "config.decode.replicas=3": "config.decode.replicas: the chart sets this key; use decode.replicas",
    "decode.gpus=2,config.decode.tensor_parallel=4": "the chart sets this key; use decode.gpus",
}
ALONE = {  # each in its own values, because they contradict each other
    "security.allowInsecure=false": "security: set security.tls.existingSecret and",
    "security.allowInsecure=false,security.tls.existingSecret=a": "security: set security.tls.existingSecret and",
    "security.tls.existingSecret=a,security.tokens.existingSecret=b": "security.allowInsecure: must be false",
    "redis.install=false": "redis.external.host: must be set",
    "redis.install=false,redis.external.host=a,redis.external.tls.existingSecret=ca": "existingSecret: requires",
    "ray.gcsFaultTolerance.enabled=true": "ray.gcsFaultTolerance.enabled: requires redis.external",
    "decode.replicas=0,prefill.replicas=0,config.mode=colocated": "decode.replicas: must be at least 1, got 0",
    "decode.autoscale.enabled=true,decode.replicas=9": "decode.replicas: must be from decode.autoscale.min (1) to",
    "security.allowInsecure=false,security.tls.existingSecret=a,security.tokens.existingSecret=b,"
    "ray.auth.mode=disabled,network.policy.enabled=false": "ray.auth.mode: must be token, or network.policy.enabled",
    "security.allowInsecure=false,security.tls.existingSecret=a,security.tokens.existingSecret=b,"
    "config.transfer.transport=nccl": "config.transfer.transport: nccl sends KV without encryption, but certificates",
    "ray.autoscaling.enabled=true": "ray.autoscaling.enabled: requires prefill.autoscale.enabled",
}
Documents = list[dict[str, Any]]


@pytest.mark.parametrize(
    "wrong", [FORM, MEANING, *({sets: says} for sets, says in ALONE.items())], ids=["form", "meaning", *ALONE]
)
def test_wrong_values_are_refused_by_name_and_all_at_once(helm: Helm, wrong: dict[str, str]):
    said = helm.refuses(MINIMAL, sets=list(wrong))
    assert [each for each in wrong.values() if each not in said] == [], said


@pytest.fixture
def mutated(helm: Helm, tmp_path: Path) -> Callable[[str, str, str], Documents]:
    """A function that replaces a text in one file of the chart and renders it with every feature enabled."""

    def render(file: str, right: str, wrong: str) -> Documents:
        chart = shutil.copytree(CHART, tmp_path / "chart")
        template = chart / "templates" / file
        text = template.read_text()
        assert right in text, f"{file} has no {right!r} any more"
        template.write_text(text.replace(right, wrong))
        return helm.render(CHART / "ci/autoscaling-values.yaml", chart=chart)

    return render


TEMPLATES: list[tuple[str, str, str, Callable[[Documents], Iterable[str]], str]] = [  # one of each check
    ("router-services.yaml", '"component" "router"', '"component" "routers"', check_selectors, "selects no pod"),
    ("raycluster.yaml", "grpc: {port: 50061}", "grpc: {port: 50062}", check_probes, "readinessProbe asks port 50062"),
    ("redis.yaml", "kind: Secret", "kind: ConfigMap", check_references, "no Secret/one-baton-redis"),
    ("_helpers.tpl", "$(REDIS_PASSWORD)", "hunter2", check_secrets, "a password in the clear: redis://:hunter2@"),
    ("_pod.tpl", '(eq .component "head")', "true", check_hardening, "automountServiceAccountToken must be False"),
    ("pdbs.yaml", "minAvailable:", "maxUnavailable:", check_budgets, "need minAvailable, as a number"),
    ("prometheusrule.yaml", "recoveries_total", "recovered_total", unknown_metrics, "baton_recovered_total"),
]


@pytest.mark.parametrize(("file", "right", "wrong", "check", "says"), TEMPLATES, ids=[one[0] for one in TEMPLATES])
def test_mistakes_in_templates_are_caught(mutated, file: str, right: str, wrong: str, check, says: str):
    found = list(check(mutated(file, right, wrong)))
    assert any(says in problem for problem in found), found


def test_mistakes_in_fields_are_caught(mutated, schemas: Schemas):
    documents = mutated("raycluster.yaml", "readinessProbe:", "readynessProbe:")
    found = [problem for document in documents for problem in schemas.problems(document)]
    assert any("'readynessProbe' was unexpected" in problem for problem in found), found


def test_mistakes_in_the_cluster_file_are_caught(mutated, tmp_path: Path):
    documents = mutated("_config.tpl", 'listen: "0.0.0.0:50061"', 'listens: "0.0.0.0:50061"')
    with pytest.raises(ConfigError, match=r"prefill\.listens"):
        load(documents, tmp_path)
