"""Mistakes in values, in templates and in the cluster file are caught, each with words that help."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError
from tests.helm.checks import check_hardening, check_ports, check_references, check_secrets, check_selectors
from tests.helm.cluster_file import load
from tests.helm.conftest import CHART, Helm
from tests.helm.metric_names import unknown_metrics
from tests.helm.schemas import Schemas

MINIMAL = CHART / "ci/minimal-values.yaml"
VALUES = {
    "no image": (["image.repository="], "image.repository: must be set"),
    "nothing secured": (["security.allowInsecure=false"], "security: set security.tls.existingSecret and"),
    "tls alone": (
        ["security.allowInsecure=false", "security.tls.existingSecret=a"],
        "security: set security.tls.existingSecret and",
    ),
    "secured and open": (
        ["security.tls.existingSecret=a", "security.tokens.existingSecret=b"],
        "security.allowInsecure: must be false",
    ),
    "two Redis": (["redis.external.host=other"], 'redis.external.host: "other" contradicts redis.install: true'),
    "no Redis": (["redis.install=false"], "redis.external.host: must be set"),
    "CA without TLS": (
        ["redis.install=false", "redis.external.host=a", "redis.external.tls.existingSecret=ca"],
        "redis.external.tls.existingSecret: needs",
    ),
    "fault tolerance on our Redis": (
        ["ray.gcsFaultTolerance.enabled=true"],
        "ray.gcsFaultTolerance.enabled: needs redis.external",
    ),
    "two claims": (
        ["model.pvc.create=true", "model.existingClaim=models"],
        'model.pvc.create: must be false when model.existingClaim ("models")',
    ),
    "a pool of none": (
        ["prefill.replicas=0"],
        "prefill.replicas: must be at least 1 but with config.mode: colocated, got 0",
    ),
    "no worker at all": (
        ["decode.replicas=0", "prefill.replicas=0", "config.mode=colocated"],
        "decode.replicas: must be at least 1, got 0",
    ),
    "replicas beyond bounds": (
        ["decode.autoscale.enabled=true", "decode.replicas=9"],
        "decode.replicas: must be from decode.autoscale.min (1) to",
    ),
    "pods scaled, workers not": (
        ["ray.autoscaling.enabled=true"],
        "ray.autoscaling.enabled: needs prefill.autoscale.enabled",
    ),
    "what the chart says itself": (
        ["config.router.grpc=1.2.3.4:1"],
        "config.router.grpc: the chart says this itself; in its place: router.service.grpcPort",
    ),
    "another Redis in config": (
        ["config.redis.url=redis://a"],
        "config.redis: the chart says this itself; in its place: redis.external",
    ),
    "a pool's size in config": (
        ["config.decode.replicas=3"],
        "config.decode.replicas: the chart says this itself; in its place: decode.replicas",
    ),
    "ranks without GPUs": (
        ["decode.gpus=2", "config.decode.tensor_parallel=4"],
        "config.decode.tensor_parallel: the chart says this itself; in its place: decode.gpus",
    ),
    # of values.schema.json
    "unknown key": (["decode.replica=2"], "replica"),
    "unknown key of the cluster file": (["config.decode.max_runing=2"], "max_runing"),
    "not a size": (["decode.sharedMemory=much"], "sharedMemory"),
    "not a digest": (["image.digest=1234"], "digest"),
    "not a policy": (["image.pullPolicy=Sometimes"], "pullPolicy"),
    "negative": (["prefill.gpus=-1"], "gpus"),
}
Documents = list[dict[str, Any]]


@pytest.mark.parametrize("name", VALUES)
def test_wrong_values_are_refused_by_name(helm: Helm, name: str):
    sets, says = VALUES[name]
    assert says in helm.refuses(MINIMAL, sets=sets)


def test_all_wrong_values_are_said_at_once(helm: Helm):
    said = helm.refuses(MINIMAL, sets=["image.repository=", "redis.external.host=other", "config.name=mine"])
    assert all(key in said for key in ("image.repository:", "redis.external.host:", "config.name:"))


def test_the_right_values_are_refused_by_none(helm: Helm):
    assert helm.refuses(MINIMAL) == ""


@pytest.fixture
def mutated(helm: Helm, tmp_path: Path) -> Callable[[str, str, str], Documents]:
    """Objects of the chart with one text of one of its files replaced, everything in it switched on."""

    def render(file: str, right: str, wrong: str) -> Documents:
        chart = shutil.copytree(CHART, tmp_path / "chart")
        text = (chart / file).read_text()
        assert right in text, f"{file} has no {right!r} any more"
        (chart / file).write_text(text.replace(right, wrong))
        return helm.render(CHART / "ci/autoscaling-values.yaml", chart=chart)

    return render


TEMPLATES: dict[str, tuple[str, str, str, Callable[[Documents], Iterable[str]], str]] = {
    "a Service that selects nothing": (
        "templates/router-services.yaml",
        '"component" "router"',
        '"component" "routers"',
        check_selectors,
        "Service/one-baton-router: selects no pod",
    ),
    "a disruption budget of another group": (
        "templates/pdbs.yaml",
        "ray.io/group: {{ $pool }}",
        "ray.io/group: {{ $pool }}s",
        check_selectors,
        "PodDisruptionBudget/one-baton-decode: selects no pod",
    ),
    "a port that pods do not have": (
        "templates/router-services.yaml",
        "targetPort: grpc",
        "targetPort: rpc",
        check_ports,
        "has no port rpc",
    ),
    "a probe of another port": (
        "templates/raycluster.yaml",
        "grpc: {port: 50061}",
        "grpc: {port: 50062}",
        check_ports,
        "readinessProbe asks port 50062",
    ),
    "a policy for a port that nobody has": (
        "templates/networkpolicies.yaml",
        "port: 50051",
        "port: 50050",
        check_ports,
        "has no port 50050",
    ),
    "a Secret that nobody makes": (
        "templates/redis.yaml",
        "kind: Secret",
        "kind: ConfigMap",
        lambda found: check_references(found, set()),
        "no Secret/one-baton-redis",
    ),
    "a scaler of nothing": (
        "templates/router-hpa.yaml",
        'kind: Deployment, name: {{ include "baton.fullname" . }}-router',
        "kind: Deployment, name: router",
        lambda found: check_references(found, set()),
        "no Deployment/router",
    ),
    "a mount without a volume": (
        "templates/raycluster.yaml",
        "{name: dshm, mountPath",
        "{name: shm, mountPath",
        lambda found: check_references(found, set()),
        "no volume shm",
    ),
    "a password in the clear": (
        "templates/_helpers.tpl",
        "$(REDIS_PASSWORD)",
        "hunter2",
        check_secrets,
        "a password in the clear: redis://:hunter2@",
    ),
    "a writable root": (
        "values.yaml",
        "readOnlyRootFilesystem: true",
        "readOnlyRootFilesystem: false",
        check_hardening,
        "readOnlyRootFilesystem true",
    ),
    "a service account's token in each pod": (
        "templates/_pod.tpl",
        '(eq .component "head")',
        "true",
        check_hardening,
        "automountServiceAccountToken must be False",
    ),
    "an alert on a metric that is not": (
        "templates/prometheusrule.yaml",
        "baton_recoveries_total",
        "baton_recovered_total",
        unknown_metrics,
        "baton_recovered_total",
    ),
    "an alert on a label that is not": (
        "templates/prometheusrule.yaml",
        ',role="decode",state=~"owned|reserved"',
        ',pool="decode",state=~"owned|reserved"',
        unknown_metrics,
        "baton_kv_blocks has no label pool",
    ),
    "an alert on a state that is not": (
        "templates/prometheusrule.yaml",
        'state="quarantined"',
        'state="in_quarantine"',
        unknown_metrics,
        "baton_kv_blocks: state is never in_quarantine",
    ),
    "an alert on a state of something else": (
        "templates/prometheusrule.yaml",
        'state="quarantined"',
        'state="ready"',
        unknown_metrics,
        "baton_kv_blocks: state is never ready",
    ),
    "an alert that is no PromQL": (
        "templates/prometheusrule.yaml",
        "sum by (reason) (increase(",
        "sum by (reason) increase(",
        unknown_metrics,
        "no PromQL, ",
    ),
    "an alert by a label that is not": (
        "templates/prometheusrule.yaml",
        "sum by (reason) (increase(",
        "sum by (cause) (increase(",
        unknown_metrics,
        "cause: no label in",
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_mistakes_in_templates_are_caught(mutated, name: str):
    file, right, wrong, check, says = TEMPLATES[name]
    found = list(check(mutated(file, right, wrong)))
    assert any(says in problem for problem in found), found


@pytest.mark.parametrize(
    ("file", "right", "wrong", "says"),
    [
        ("templates/raycluster.yaml", "readinessProbe:", "readynessProbe:", "'readynessProbe' was unexpected"),
        ("templates/raycluster.yaml", "objectStoreMemory | quote", "objectStoreMemory", "is not of type 'string'"),
        ("templates/pdbs.yaml", "maxUnavailable:", "maxUnavailables:", "'maxUnavailables' was unexpected"),
        (
            "templates/router-deployment.yaml",
            "containerPort: 50051",
            'containerPort: "grpc"',
            "'grpc' is not of type 'integer'",
        ),
    ],
)
def test_mistakes_in_fields_are_caught(mutated, schemas: Schemas, file: str, right: str, wrong: str, says: str):
    found = [problem for document in mutated(file, right, wrong) for problem in schemas.problems(document)]
    assert any(says in problem for problem in found), found


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ('listen: "0.0.0.0:50061"', 'listens: "0.0.0.0:50061"', "prefill.listens"),
        ("allow_insecure: {{", "allow_insecure: false #{{", "router.grpc (0.0.0.0:50051): listens beyond this machine"),
        ("{baton.io/pool: {{ .pool }}}", "{baton.io/pool: 7}", "prefill.node_labels.baton.io/pool"),
    ],
)
def test_mistakes_in_the_cluster_file_are_caught(mutated, tmp_path: Path, right: str, wrong: str, says: str):
    with pytest.raises(ConfigError) as refused:
        load(mutated("templates/_config.tpl", right, wrong), tmp_path)
    assert says in str(refused.value)
