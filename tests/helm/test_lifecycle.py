"""install, test, upgrade, rollback, history and uninstall, by real helms against a stand-in for the API server.

No pods start here. The tests show that helm can create, change and delete the chart's objects.
"""

import base64
import dataclasses
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helm.conftest import CHART, MINIMAL, NAMESPACE, RELEASE, Helm, Schemas
from tests.helm.kube import Cluster, served

pytestmark = pytest.mark.slow
Done = subprocess.CompletedProcess[str]
OF_HELM = "sh.helm.release.v1."
# Objects that null enables: this API server has these kinds, `helm template` does not.
MONITORS = {f"PodMonitor/one-baton-{what}" for what in ("router", "worker", "ray")} | {"PrometheusRule/one-baton"}


@pytest.fixture
def cluster(known_schemas: Schemas | None) -> Iterator[Cluster]:
    """The objects of an API server. Without schemas, it accepts objects of any form."""
    with served(known_schemas.problems if known_schemas else lambda _: []) as cluster:
        yield cluster


@pytest.fixture
def there(helm: Helm, cluster: Cluster, tmp_path: Path) -> Helm:
    config = tmp_path / "kubeconfig"
    config.write_text(cluster.kubeconfig())
    return dataclasses.replace(helm, kubeconfig=config)


def install(helm: Helm, *more: str, values: Path = MINIMAL, how: str = "install", check: bool = True) -> Done:
    return helm.run(how, RELEASE, str(CHART), "-n", NAMESPACE, "-f", str(values), *more, check=check)


def names(cluster: Cluster) -> set[str]:
    """Return the names of all objects but helm's own."""
    return {f"{kind}/{name}" for _, kind, name in cluster.objects if not name.startswith(OF_HELM)}


def replicas(cluster: Cluster) -> tuple[int, int]:
    """Return the replicas of routers and of decode pods."""
    groups = cluster.of_kind("RayCluster")["one-baton"]["spec"]["workerGroupSpecs"]
    decode = next(group["replicas"] for group in groups if group["groupName"] == "decode")
    return cluster.of_kind("Deployment")["one-baton-router"]["spec"]["replicas"], decode


def test_install_test_upgrade_rollback_uninstall(there: Helm, cluster: Cluster):
    install(there)
    expected = {f"{one['kind']}/{one['metadata']['name']}" for one in there.render(MINIMAL)}
    assert names(cluster) == expected - {"Pod/one-baton-serves"} | MONITORS
    assert replicas(cluster) == (2, 1)

    there.run("test", RELEASE, "-n", NAMESPACE, "--timeout", "50s")
    assert "Pod/one-baton-serves" not in names(cluster)  # deleted after its hook has succeeded

    install(there, "--set=router.replicas=5,decode.replicas=3,router.http=false", how="upgrade")
    assert replicas(cluster) == (5, 3)
    ports = cluster.of_kind("Deployment")["one-baton-router"]["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert [port["name"] for port in ports] == ["grpc", "admin", "metrics"]

    there.run("rollback", RELEASE, "1", "-n", NAMESPACE)
    assert replicas(cluster) == (2, 1)
    history = json.loads(there.run("history", RELEASE, "-n", NAMESPACE, "-o", "json").stdout)
    assert [entry["status"] for entry in history] == ["superseded", "superseded", "deployed"]

    there.run("uninstall", RELEASE, "-n", NAMESPACE)
    assert cluster.objects == {}


def test_the_password_is_made_once(there: Helm, cluster: Cluster):
    def password() -> str:
        return str(cluster.of_kind("Secret")["one-baton-redis"]["data"]["password"])

    install(there)
    first = password()
    assert len(base64.b64decode(first)) == 40
    install(there, "--set=router.replicas=3", how="upgrade")
    assert password() == first


def test_the_model_survives(there: Helm, cluster: Cluster):
    install(there, values=CHART / "ci/gpu-rdma-values.yaml")
    there.run("uninstall", RELEASE, "-n", NAMESPACE)
    assert names(cluster) == {"PersistentVolumeClaim/one-baton-model"}


def test_notes_say_what_to_do_and_warn(there: Helm):
    said = install(there, "--set=network.policy.enabled=false").stdout
    assert "one-baton-router.serving.svc:50051" in said
    assert "WARNING security.allowInsecure" in said
    assert "every pod of this Kubernetes cluster has full access" in said


def test_nothing_is_installed_unsecured(there: Helm, cluster: Cluster):
    done = there.run("install", RELEASE, str(CHART), "-n", NAMESPACE, "--set", "image.repository=a", check=False)
    assert done.returncode != 0
    assert "security: set security.tls.existingSecret" in done.stderr
    assert names(cluster) == set()


def test_an_object_that_kubernetes_refuses_fails_the_install(there: Helm, schemas: Schemas):
    wrong = [{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"port": 1}}]
    done = install(there, "--set-json", f"extraObjects={json.dumps(wrong)}", check=False)
    assert done.returncode != 0
    assert "'port' was unexpected" in done.stderr
