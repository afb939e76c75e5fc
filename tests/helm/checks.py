"""Consistency checks between the objects of a release, and the mounted cluster file, read as the pods would read it.

Each check yields its problems; none needs a cluster.
Pods are those that Kubernetes and KubeRay would create. `pods` adds KubeRay's labels.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.cli.setup.certs import certs
from baton.config import ClusterConfig, load_config

Object = dict[str, Any]
PLAIN_PASSWORD = re.compile(r"://[^/@\s]*:([^@\s]+)@")
SECRET_NAME = re.compile(r"PASSWORD|TOKEN|SECRET|_AUTH$")
FROM_SECRET = "$(REDIS_PASSWORD)"
PASSWORD = "0123456789abcdef"  # its value in these tests
SOURCES = (  # of volumes: field, kind of the object, field of its name
    ("configMap", "ConfigMap", "name"),
    ("secret", "Secret", "secretName"),
    ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
)
WORKLOADS = ("Deployment", "StatefulSet")


@dataclass(frozen=True)
class Pod:
    """A pod that the release creates."""

    owner: str
    labels: Mapping[str, str]
    spec: Object

    @property
    def containers(self) -> list[Object]:
        """All containers, init containers included."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def ports(self) -> set[str | int]:
        """Names and numbers of its ports."""
        ports = [port for container in self.containers for port in container.get("ports", [])]
        return {port["name"] for port in ports} | {port["containerPort"] for port in ports}

    def matches(self, selector: Mapping[str, Any]) -> bool:
        exact = all(self.labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
        terms = selector.get("matchExpressions", [])
        assert all(term["operator"] == "In" for term in terms)
        return exact and all(self.labels.get(term["key"]) in term["values"] for term in terms)


def pods(documents: list[Object]) -> list[Pod]:
    """Return the pods of all objects, hooks included."""
    return [pod for document in documents for pod in _pods_of(document)]


def pod_of(documents: list[Object], end: str) -> Pod:
    """Return the only pod whose owner ends so."""
    (found,) = (pod for pod in pods(documents) if pod.owner.endswith(end))
    return found


def _pods_of(document: Object) -> Iterator[Pod]:
    name, kind = document["metadata"]["name"], document["kind"]
    if kind == "Pod":
        yield Pod(f"Pod/{name}", document["metadata"]["labels"], document["spec"])
    elif kind in WORKLOADS:
        template = document["spec"]["template"]
        yield Pod(f"{kind}/{name}", template["metadata"]["labels"], template["spec"])
    elif kind == "RayCluster":
        groups = [("head", document["spec"]["headGroupSpec"])]
        groups += [(group["groupName"], group) for group in document["spec"]["workerGroupSpecs"]]
        for group_name, group in groups:
            kuberay = {"ray.io/cluster": name, "ray.io/group": "headgroup" if group_name == "head" else group_name}
            kuberay |= {"ray.io/node-type": "head" if group_name == "head" else "worker", "ray.io/is-ray-node": "yes"}
            template = group["template"]
            yield Pod(f"RayCluster/{name}/{group_name}", template["metadata"]["labels"] | kuberay, template["spec"])


def cluster_file(documents: list[Object]) -> str:
    """Return the text of the router's cluster file."""
    volumes = pod_of(documents, "-router").spec["volumes"]
    (name,) = (volume["configMap"]["name"] for volume in volumes if volume["name"] == "config")
    (found,) = (one for one in documents if one["kind"] == "ConfigMap" and one["metadata"]["name"] == name)
    return str(found["data"]["cluster.yaml"])


def load(documents: list[Object], folder: Path) -> ClusterConfig:
    """Load the file with the environment of the router's pod. Required certificates are created in `folder`."""
    text = cluster_file(documents)
    if "/etc/baton-tls" in text:
        certs(folder / "made", ["baton.example"], days=2)
        for made, mounted in (("ca.pem", "ca.crt"), ("cert.pem", "tls.crt"), ("key.pem", "tls.key")):
            (folder / mounted).write_bytes((folder / "made" / made).read_bytes())
    file = folder / "cluster.yaml"
    file.write_text(text.replace("/etc/baton-tls", str(folder)), encoding="utf-8")
    (container,) = pod_of(documents, "-router").spec["containers"]
    variables = {one["name"]: one.get("value", "") for one in container["env"]}
    return load_config(file, env={name: value.replace(FROM_SECRET, PASSWORD) for name, value in variables.items()})


def _named(documents: list[Object]) -> Iterator[tuple[str, Object]]:
    for document in documents:
        yield f"{document['kind']}/{document['metadata']['name']}", document


def _selector(document: Object) -> Mapping[str, Any] | None:
    """Return the label selector for the pods of `document`, or None if it selects none."""
    kind, spec = document["kind"], document.get("spec", {})
    if kind == "Service":
        return {"matchLabels": spec["selector"]}
    if kind == "NetworkPolicy":
        return spec["podSelector"]
    return spec["selector"] if kind in {"PodDisruptionBudget", "PodMonitor", *WORKLOADS} else None


def _selected_ports(document: Object) -> list[str | int]:
    """Return the ports of the selected pods that `document` names."""
    kind, spec = document["kind"], document.get("spec", {})
    if kind == "Service":
        return [port["targetPort"] for port in spec["ports"]]
    if kind == "PodMonitor":
        return [endpoint["port"] for endpoint in spec["podMetricsEndpoints"]]
    rules = spec.get("ingress", []) if kind == "NetworkPolicy" else []
    return [port["port"] for rule in rules for port in rule.get("ports", [])]


def check_selectors(documents: list[Object]) -> Iterator[str]:
    """Yield selectors without pods, workloads that select others' pods, and ports that the selected pods lack."""
    for who, document in _named(documents):
        if (selector := _selector(document)) is not None:
            found = [pod for pod in pods(documents) if pod.matches(selector)]
            owners = [pod.owner for pod in found]
            if not found:
                yield f"{who}: selects no pod: {selector}"
            if document["kind"] in WORKLOADS and owners != [who]:
                yield f"{who}: selects {owners}"
            wanted = [(pod, port) for pod in found for port in _selected_ports(document)]
            yield from (f"{who}: {pod.owner} has no port {port}" for pod, port in wanted if port not in pod.ports)


def check_probes(documents: list[Object]) -> Iterator[str]:
    """Yield probes of ports that their pods lack."""
    for pod in pods(documents):
        yield from (f"{pod.owner}: {kind} asks port {port}" for kind, port in _probed(pod) if port not in pod.ports)


def _probed(pod: Pod) -> Iterator[tuple[str, str | int]]:
    for container in pod.containers:
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container.get(kind, {})
            yield from ((kind, probe[how]["port"]) for how in ("grpc", "httpGet", "tcpSocket") if how in probe)


def check_references(documents: list[Object], external: Collection[str] = ()) -> Iterator[str]:
    """Yield missing objects that pods and scalers name. `external`: existing ones, such as `Secret/name`."""
    there = {*external, *(who for who, _ in _named(documents))}
    for pod in pods(documents):
        yield from (f"{pod.owner}: no {what}" for what in sorted(_needs(pod)) if what not in there)
        volumes = {volume["name"] for volume in pod.spec.get("volumes", [])}
        volumes |= {"data"} if pod.owner.startswith("StatefulSet/") else set()
        for container in pod.containers:
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            yield from (f"{pod.owner}: no volume {name}" for name in sorted(mounted - volumes))
    for who, document in _named(documents):
        if document["kind"] == "HorizontalPodAutoscaler":
            target = document["spec"]["scaleTargetRef"]
            if f"{target['kind']}/{target['name']}" not in there:
                yield f"{who}: no {target['kind']}/{target['name']}"


def _needs(pod: Pod) -> set[str]:
    needs = {f"ServiceAccount/{pod.spec['serviceAccountName']}"}
    needs |= {f"Secret/{secret['name']}" for secret in pod.spec.get("imagePullSecrets", [])}
    for container in pod.containers:
        for source in (variable.get("valueFrom", {}) for variable in container.get("env", [])):
            needs |= {f"Secret/{source['secretKeyRef']['name']}"} if "secretKeyRef" in source else set()
    for volume in pod.spec.get("volumes", []):
        needs |= {f"{kind}/{volume[source][key]}" for source, kind, key in SOURCES if source in volume}
    return needs


def check_secrets(documents: list[Object]) -> Iterator[str]:
    """Yield passwords and tokens in a ConfigMap, an environment or a command."""
    for who, document in _named(documents):
        texts = _texts(document) if document["kind"] != "Secret" else ()
        clear = (text for text in texts if set(PLAIN_PASSWORD.findall(text)) - {FROM_SECRET})
        yield from (f"{who}: a password in the clear: {text[:100]}" for text in clear)
    for pod in pods(documents):
        variables = [variable for container in pod.containers for variable in container.get("env", [])]
        for variable in variables:
            if SECRET_NAME.search(variable["name"]) and "secretKeyRef" not in variable.get("valueFrom", {}):
                yield f"{pod.owner}: {variable['name']}: not from a Secret"


def _texts(node: object) -> Iterator[str]:
    """Yield all strings within a tree of objects and lists."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict | list):
        for inner in node.values() if isinstance(node, dict) else node:
            yield from _texts(inner)


def check_hardening(documents: list[Object]) -> Iterator[str]:
    """Yield violations of the Pod Security Standard `restricted`, writable roots, and tokens of the API server."""
    for pod in pods(documents):
        context, scaled = pod.spec.get("securityContext", {}), "restartPolicy" in pod.spec and "/head" in pod.owner
        if not context.get("runAsNonRoot") or context.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{pod.owner}: runs as root, or without a seccomp profile"
        if pod.spec.get("automountServiceAccountToken") is not scaled:
            yield f"{pod.owner}: automountServiceAccountToken must be {scaled}"
        for container in pod.containers:
            who, own = f"{pod.owner}: {container['name']}", container.get("securityContext", {})
            if own.get("allowPrivilegeEscalation") is not False or own.get("readOnlyRootFilesystem") is not True:
                yield f"{who}: allowPrivilegeEscalation must be false, readOnlyRootFilesystem true"
            if own.get("capabilities", {}).get("drop") != ["ALL"]:
                yield f"{who}: must drop all capabilities"
            if "memory" not in container.get("resources", {}).get("limits", {}):
                yield f"{who}: has no memory limit"
            if not re.search(r"@sha256:[0-9a-f]{64}$|:(?!latest$)[\w.-]+$", container["image"]):
                yield f"{who}: the image {container['image']} is not pinned"


def check_budgets(documents: list[Object]) -> Iterator[str]:
    """Yield budgets that never allow an eviction, because the disruption controller of Kubernetes cannot count pods.
    For maxUnavailable and percentages it needs an owner with a scale subresource, which a RayCluster does not have
    (`getExpectedPodCount` in pkg/controller/disruption/disruption.go of 1.34).
    """
    for who, document in _named(documents):
        if document["kind"] == "PodDisruptionBudget":
            spec = document["spec"]
            owners = {pod.owner.partition("/")[0] for pod in pods(documents) if pod.matches(spec["selector"])}
            if "RayCluster" in owners and not isinstance(spec.get("minAvailable"), int):
                yield f"{who}: the pods of a RayCluster need minAvailable, as a number"


Check = Callable[[list[Object]], Iterator[str]]
CHECKS: tuple[Check, ...] = (check_selectors, check_probes, check_secrets, check_hardening, check_budgets)
