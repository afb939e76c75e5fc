"""The chart, rendered by real helms for each way to install, is valid for Kubernetes, KubeRay and Baton."""

import pytest
import yaml

from baton.config import load_config
from baton.core import Role
from tests.helm.checks import CHECKS, PASSWORD, Object, check_references, load, pod_of
from tests.helm.conftest import CHART, CI, MINIMAL, NAMES, ROOT, Helm, Schemas

Documents = list[Object]
Rendered = dict[str, Documents]
# Objects that each way to install expects to exist.
EXTERNAL = {
    "gpu-rdma": {"Secret/registry", "Secret/hub", "PersistentVolumeClaim/kernels"},
    "external-redis-tls": {"Secret/site-redis", "Secret/site-ca", "Secret/ray-token", "PersistentVolumeClaim/models"},
    "tls-tokens": {
        "Secret/baton-tls",
        "Secret/baton-tokens",
        "Secret/baton-receipts",
        "Secret/baton-user",
        "Secret/baton-redis",
    },
}

ROLES = {"head": "/head", "prefill": "/prefill", "decode": "/decode", "router": "-router", "tests": "-serves"}


def of_kind(documents: Documents, kind: str) -> Documents:
    return [document for document in documents if document["kind"] == kind]


def groups_of(documents: Documents) -> dict[str, Object]:
    (cluster,) = of_kind(documents, "RayCluster")
    return {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}


def test_lint(helm: Helm):
    for path in CI:
        assert "0 chart(s) failed" in helm.run("lint", "--strict", str(CHART), "-f", str(path)).stdout
    helm.run("lint", "--strict", str(CHART))


@pytest.mark.parametrize("name", NAMES)
def test_schemas_of_kubernetes(rendered: Rendered, schemas: Schemas, name: str):
    problems = [f"{one['kind']}: {problem}" for one in rendered[name] for problem in schemas.problems(one)]
    assert not problems


@pytest.mark.parametrize("name", NAMES)
def test_objects_fit_each_other(rendered: Rendered, name: str):
    documents = rendered[name]
    found = [problem for check in CHECKS for problem in check(documents)]
    assert [*found, *check_references(documents, EXTERNAL.get(name, set()))] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_cluster_file_loads_and_pods_have_room_for_one_worker(rendered: Rendered, name: str, tmp_path):
    config = load(rendered[name], tmp_path)
    assert config.ray.address == "auto"
    listeners = config.router.grpc, config.router.admin, config.router.metrics
    assert listeners == ("0.0.0.0:50051", "0.0.0.0:50052", "0.0.0.0:9100")
    assert {config.prefill.listen, config.decode.listen} == {"0.0.0.0:50061"}
    assert {config.prefill.metrics, config.decode.metrics} == {"0.0.0.0:9101"}
    assert {config.prefill.interface, config.decode.interface} == {"eth0"}
    groups = groups_of(rendered[name])
    labels = {group: found["labels"] for group, found in groups.items()}
    assert labels == {"prefill": config.prefill.node_labels, "decode": config.decode.node_labels}
    for group, pool in (("prefill", config.prefill), ("decode", config.decode)):
        room = 1 if pool.threads == "auto" else pool.threads * pool.tensor_parallel
        assert groups[group]["rayStartParams"]["num-cpus"] == str(room), "a second worker would find its port taken"
        limits = groups[group]["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert int(limits.get("nvidia.com/gpu", 0)) == pool.gpus


@pytest.mark.parametrize("claim", ["", "kernels-of-all"])
def test_a_worker_of_several_gpus_gets_them_with_shared_memory_and_a_cache_of_kernels(helm: Helm, tmp_path, claim: str):
    sets = ["prefill.gpus=8", "prefill.sharedMemory=32Gi", "kernelCache.mountPath=/cache", "kernelCache.size=3Gi"]
    documents = helm.render(MINIMAL, sets=[*sets, f"kernelCache.existingClaim={claim}"])
    prefill = load(documents, tmp_path).prefill
    assert (prefill.device, prefill.tensor_parallel) == ("cuda", 8)
    specs = {name: group["template"]["spec"] for name, group in groups_of(documents).items()}
    containers = {name: spec["containers"][0] for name, spec in specs.items()}
    given = [containers["prefill"]["resources"][part]["nvidia.com/gpu"] for part in ("requests", "limits")]
    assert given == ["8", "8"]
    volumes = specs["prefill"]["volumes"]
    assert {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Gi"}} in volumes
    kept = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {"sizeLimit": "3Gi"}}
    assert {"name": "kernels", **kept} in volumes
    mounts = {one["name"]: one["mountPath"] for one in containers["prefill"]["volumeMounts"]}
    assert (mounts["dshm"], mounts["kernels"]) == ("/dev/shm", "/cache")
    caches = {"TRITON_CACHE_DIR": "/cache/triton", "TORCHINDUCTOR_CACHE_DIR": "/cache/inductor"}
    variables = {one["name"]: one.get("value") for one in containers["prefill"]["env"]}
    assert caches.items() <= variables.items()
    assert not caches.keys() & {one["name"] for one in containers["decode"]["env"]}, "the other pool has no GPUs"
    assert "kernels" not in [one["name"] for one in specs["decode"]["volumes"]]
    assert not list(check_references(documents, {f"PersistentVolumeClaim/{claim}"}))


@pytest.mark.parametrize(
    ("scale", "replicas"),
    [([], (6, 6)), (["ray.autoscaling.enabled=true", "decode.autoscale.enabled=true"], (1 + 2, 4 + 2))],
    ids=["fixed", "scaled"],
)
def test_colocated_workers_are_one_group_with_pods_for_all(helm: Helm, tmp_path, scale: list[str], replicas):
    """The group has as many pods as the loader of the cluster file counts, and their placement."""
    sets = ["config.mode=colocated", "prefill.replicas=2", "prefill.sparePods=1", "decode.replicas=3"]
    documents = helm.render(MINIMAL, sets=[*sets, "metrics.rules.enabled=true", *scale])
    config = load(documents, tmp_path)
    (group,) = groups_of(documents).values()
    assert (group["minReplicas"], group["maxReplicas"]) == replicas
    assert group["labels"] == config.decode.node_labels
    assert (config.prefill.replicas, config.decode.replicas) == (0, 5)
    assert not scale or config.bounds == {Role.DECODE: replicas}
    assert budgets_of(documents) == {"router": {"maxUnavailable": 1}, "decode": {"minAvailable": 2 if scale else 4}}
    (rules,) = of_kind(documents, "PrometheusRule")
    missed = [one["expr"] for one in rules["spec"]["groups"][0]["rules"] if one["alert"] == "BatonNoWorkers"]
    assert [expr.count('role=~"decode"') for expr in missed] == [1], "a pool that is not there is not missed"
    assert [problem for check in (*CHECKS, check_references) for problem in check(documents)] == []


def budgets_of(documents: list[Object]) -> dict[str, dict[str, int]]:
    """Return how many pods may be evicted, by the last part of the budget's name."""
    found = {one["metadata"]["name"]: one["spec"] for one in of_kind(documents, "PodDisruptionBudget")}
    fields = {name: {key: spec[key] for key in spec if "vailable" in key} for name, spec in found.items()}
    return {name.rpartition("-")[2]: limits for name, limits in fields.items()}


@pytest.mark.parametrize(("most", "least"), [("1", 4), ("0", 5), ("50%", 2), ("100%", 0), ("9", 0)])
def test_so_many_pods_of_a_pool_may_be_evicted(helm: Helm, most: str, least: int):
    sets = ["decode.replicas=5", "decode.sparePods=2", f"decode.maxUnavailable={most}"]
    budgets = budgets_of(helm.render(MINIMAL, sets=sets))
    assert (budgets["decode"], budgets["prefill"]) == ({"minAvailable": least}, {"minAvailable": 0})


def test_pods_that_the_autoscaler_may_leave_without_a_worker_do_not_count(helm: Helm):
    """They are not ready then, and a budget above the workers would allow no eviction."""
    sets = ["decode.replicas=4", "decode.autoscale.enabled=true", "decode.autoscale.min=2"]
    assert budgets_of(helm.render(MINIMAL, sets=sets))["decode"] == {"minAvailable": 1}


def test_one_colocated_worker_is_enough(helm: Helm, tmp_path):
    documents = helm.render(MINIMAL, sets=["config.mode=colocated", "prefill.replicas=0"])
    assert [group["maxReplicas"] for group in groups_of(documents).values()] == [1]
    assert load(documents, tmp_path).decode.replicas == 1


def test_the_pod_of_helm_test_goes_when_it_has_succeeded(rendered: Rendered):
    (pod,) = of_kind(rendered["minimal"], "Pod")
    hooks = {"helm.sh/hook": "test", "helm.sh/hook-delete-policy": "before-hook-creation,hook-succeeded"}
    assert pod["metadata"]["annotations"] == hooks


def test_keys_of_the_values_are_keys_of_the_cluster_file(rendered: Rendered, tmp_path):
    config = load(rendered["cpu-dev"], tmp_path)
    assert (config.name, config.log.format, config.router.policy) == ("dev", "json", "least_loaded")
    assert (config.router.queue.max_tokens, config.router.queue.max_wait_s) == (2_000_000, 2.5)
    assert (config.decode.max_running, config.decode.replicas, config.prefill.threads) == (16, 2, 2)
    assert (config.router.http, config.security.allow_insecure) == (None, True)
    assert config.redis.url == f"redis://:{PASSWORD}@dev-redis:6379/0"


def test_the_config_that_is_shown_is_the_one_that_is_mounted(helm: Helm, tmp_path):
    """configs/kubernetes.yaml equals the chart's config for the same values."""
    values = {
        "image": {"repository": "baton"},
        "fullnameOverride": "kubernetes",
        "security": {"allowInsecure": True},
        "model": {"path": "qwen3-8b", "existingClaim": "models"},
        "prefill": {"replicas": 2, "gpus": 1, "autoscale": {"enabled": True, "min": 1, "max": 4}},
        "decode": {"replicas": 3, "gpus": 1, "autoscale": {"enabled": True, "min": 1, "max": 6}},
        "ray": {"autoscaling": {"enabled": True}},
        "config": {
            "model": {"dtype": "bfloat16", "max_model_len": 32768},
            "decode": {"max_running": 256},
            "scaling": {"turn": False, "drain_s": 60},
            "log": {"format": "json"},
        },
    }
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    shown = load_config(ROOT / "configs/kubernetes.yaml").model_dump()
    mounted = load(helm.render(file), tmp_path).model_dump()
    assert mounted.pop("redis")["url"].replace(f":{PASSWORD}@", "") == shown.pop("redis")["url"]
    assert mounted == shown


def test_tls_and_tokens(rendered: Rendered, tmp_path):
    config = load(rendered["tls-tokens"], tmp_path)
    assert config.security.tls is not None
    assert (config.security.tls.name, config.security.tokens) == ("baton.example", "/etc/baton-tokens/tokens.yaml")
    assert config.security.receipt_key == "/etc/baton-receipts/receipt.pem"
    mounts = {name: str(pod_of(rendered["tls-tokens"], name).spec) for name in ("-router", "/decode")}
    assert ["/etc/baton-receipts" in text for text in mounts.values()] == [True, False], "only routers have the key"
    assert config.security.allow_insecure == ("router.metrics", "prefill.metrics", "decode.metrics")
    assert config.kv_is_encrypted
    router = pod_of(rendered["tls-tokens"], "-router").spec["containers"][0]
    assert router["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "metrics"}
    assert "tcpSocket" in pod_of(rendered["tls-tokens"], "/decode").spec["containers"][0]["readinessProbe"]
    test = pod_of(rendered["tls-tokens"], "-serves").spec["containers"][0]
    assert "--tls=/etc/baton-tls/ca.crt" in test["command"]
    ports = [port for one in of_kind(rendered["tls-tokens"], "Service") for port in one["spec"]["ports"]]
    assert {port["appProtocol"] for port in ports if port["name"] == "grpc"} == {"https"}


@pytest.mark.parametrize("transport", ["auto", "nccl"])
def test_a_secured_release_may_send_kv_in_the_clear(helm: Helm, tmp_path, transport: str):
    sets = ["security.allowPlainKv=true", f"config.transfer.transport={transport}"]
    config = load(helm.render(CHART / "ci/tls-tokens-values.yaml", sets=sets), tmp_path)
    assert (config.transfer.transport, config.kv_is_encrypted) == (transport, False)


def test_external_redis(rendered: Rendered, tmp_path):
    documents = rendered["external-redis-tls"]
    expected = f"rediss://baton:{PASSWORD}@redis.example:6380/2?ssl_ca_certs=/etc/baton-redis/ca.crt"
    assert load(documents, tmp_path).redis.url == expected
    assert not of_kind(documents, "StatefulSet")
    (cluster,) = of_kind(documents, "RayCluster")
    assert cluster["spec"]["gcsFaultToleranceOptions"]["redisAddress"] == "rediss://redis.example:6380"
    mounts = {mount["name"]: mount for mount in pod_of(documents, "/prefill").spec["containers"][0]["volumeMounts"]}
    assert mounts["model"] == {"name": "model", "mountPath": "/models", "readOnly": True, "subPath": "published"}
    assert load(documents, tmp_path).model.path == "/models/qwen3-8b"


def test_gpus_and_rdma(rendered: Rendered, tmp_path):
    documents = rendered["gpu-rdma"]
    worker = pod_of(documents, "/prefill")
    ray = worker.spec["containers"][0]
    for kind in ("requests", "limits"):
        assert (ray["resources"][kind]["nvidia.com/gpu"], ray["resources"][kind]["rdma/ib"]) == ("1", "1")
    env = {one["name"]: one.get("value") for one in ray["env"]}
    assert (env["NCCL_IB_DISABLE"], env["NCCL_IB_HCA"], env["NCCL_SOCKET_IFNAME"]) == ("0", "mlx5", "eth0")
    assert ray["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}} in worker.spec["volumes"]
    terms = worker.spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert [worker.matches(term["labelSelector"]) for term in terms] == [True]
    config = load(documents, tmp_path)
    assert (config.prefill.device, config.decode.device, config.decode.replicas) == ("cuda", "cuda", 4)
    (claim,) = of_kind(documents, "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_autoscaling(rendered: Rendered, tmp_path):
    documents = rendered["autoscaling"]
    (cluster,) = of_kind(documents, "RayCluster")
    groups = groups_of(documents)
    assert cluster["spec"]["enableInTreeAutoscaling"] is True
    assert (groups["decode"]["minReplicas"], groups["decode"]["maxReplicas"]) == (2, 16)
    assert "replicas" not in groups["decode"]  # an upgrade must not undo the autoscaler's change
    config = load(documents, tmp_path)
    assert config.decode.autoscale is not None
    assert (config.decode.autoscale.min, config.decode.autoscale.max) == (2, 16)
    (deployment,) = of_kind(documents, "Deployment")
    assert "replicas" not in deployment["spec"]


def test_a_changed_config_rolls_the_routers(helm: Helm):
    def checksum(*sets: str) -> str:
        (deployment,) = of_kind(helm.render(MINIMAL, sets=sets), "Deployment")
        return str(deployment["spec"]["template"]["metadata"]["annotations"]["checksum/config"])

    assert checksum() == checksum()
    assert checksum() != checksum("config.slo.itl_ms=50")


def test_long_names_stay_within_63_characters(helm: Helm):
    documents = helm.render(MINIMAL, sets=["fullnameOverride=" + "a" * 39 + ".b-and-more"])
    names = [document["metadata"]["name"] for document in documents]
    assert max(map(len, names)) <= 63
    assert all(name.startswith("a" * 39) for name in names)


def test_monitors_come_where_the_cluster_knows_them(helm: Helm):
    known = [f"--api-versions=monitoring.coreos.com/v1/{kind}" for kind in ("PodMonitor", "PrometheusRule")]
    command = ["template", "one", str(CHART), "-f", str(MINIMAL)]
    assert "kind: PodMonitor" not in helm.run(*command).stdout
    assert {"kind: PodMonitor", "kind: PrometheusRule"} <= set(helm.run(*command, *known).stdout.splitlines())


@pytest.mark.parametrize("model", ["path=hf:org/name", "path=m,model.existingClaim=models"], ids=["hub", "claim"])
def test_settings_of_a_role_reach_all_its_containers(helm: Helm, tmp_path, model: str):
    """A proxy, a certificate, resources, labels and the security context also reach the init containers."""
    mount = {"name": "ca", "mountPath": "/ca"}
    common = {"extraVolumes": [{"name": "ca", "emptyDir": {}}], "extraVolumeMounts": [mount]}
    roles: Object = {}
    for role in ROLES:
        proxy = [{"name": "HTTPS_PROXY", "value": role}]
        roles[role] = {**common, "extraEnv": proxy, "resources": {"limits": {"example/role": f"{len(roles)}"}}}
    scaling = {"enabled": True, "resources": roles["head"]["resources"]}
    ray = {"head": roles["head"], "autoscaling": scaling, "extraEnv": [{"name": "RAY", "value": "all"}]}
    values = {name: role for name, role in roles.items() if name != "head"} | {
        "ray": ray,
        "commonLabels": {"team": "a"},
    }
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values | {"containerSecurityContext": {"runAsUser": 7}}))
    documents = helm.render(MINIMAL, file, sets=[f"model.{model}", "decode.autoscale.enabled=true"])
    (cluster,) = of_kind(documents, "RayCluster")
    for role, end in ROLES.items():
        pod = pod_of(documents, end)
        assert pod.labels["team"] == "a"
        for container in [*pod.containers, *([cluster["spec"]["autoscalerOptions"]] if role == "head" else [])]:
            env = {one["name"]: one.get("value") for one in container["env"]}
            assert (env["HTTPS_PROXY"], env.get("RAY")) == (role, "all" if "/" in end else None)
            assert mount in container["volumeMounts"]
            assert (
                container["resources"]["limits"]["example/role"] == roles[role]["resources"]["limits"]["example/role"]
            )
            assert container["securityContext"]["runAsUser"] == 7
    assert [len(pod_of(documents, end).containers) for end in ("/prefill", "/decode", "-serves")] == [2, 2, 2]
    redis = pod_of(documents, "-redis")
    assert (redis.labels["team"], redis.containers[0]["securityContext"]["runAsUser"]) == ("a", 7)
