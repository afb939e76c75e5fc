"""An API server's discovery documents: versions, kinds and their operations."""

import re
from collections.abc import Mapping

from tests.helm.kube_wire import Object

KINDS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("", "v1"): ("ConfigMap", "PersistentVolumeClaim", "Pod", "Secret", "Service", "ServiceAccount"),
    ("apps", "v1"): ("Deployment", "ReplicaSet", "StatefulSet"),
    ("autoscaling", "v2"): ("HorizontalPodAutoscaler",),
    ("monitoring.coreos.com", "v1"): ("PodMonitor", "PrometheusRule"),
    ("networking.k8s.io", "v1"): ("NetworkPolicy",),
    ("policy", "v1"): ("PodDisruptionBudget",),
    ("ray.io", "v1"): ("RayCluster",),
}
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


def plural(kind: str) -> str:
    return kind.lower().removesuffix("y") + ("ies" if kind.endswith("y") else "s")


def api_version(group: str, version: str) -> str:
    return f"{group}/{version}" if group else version


PLURALS = {(api_version(*gv), plural(kind)): kind for gv, kinds in KINDS.items() for kind in kinds}


GROUPS = {api_version(*gv): kinds for gv, kinds in KINDS.items()}
_NAMED = [{"groupVersion": api_version(*gv), "version": gv[1]} for gv in KINDS if gv[0]]
_LISTED = [{"name": one["groupVersion"].split("/")[0], "versions": [one], "preferredVersion": one} for one in _NAMED]
_PREFIXES = [("apis/" if "/" in version else "api/") + version for version in GROUPS]
FIXED: Mapping[str, Object] = {
    "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0", "platform": "linux/amd64"},
    "/api": {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": _LISTED},
    "/openapi/v3": {"paths": {prefix: {"serverRelativeURL": f"/openapi/v3/{prefix}"} for prefix in _PREFIXES}},
}


def discovery(path: str) -> Object | None:
    """Return a discovery document, or None for other paths."""
    if path in FIXED:
        return FIXED[path]
    version = re.sub(r"^(/openapi/v3)?/apis?/", "", path)
    if version not in GROUPS:
        return None
    if path.startswith("/openapi"):  # just enough to announce support of ?fieldValidation=
        return {"paths": dict(_patch_of(version, kind) for kind in GROUPS[version])}
    resources = [
        {"name": plural(kind), "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": VERBS}
        for kind in GROUPS[version]
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


def _patch_of(version: str, kind: str) -> tuple[str, Object]:
    group, _, bare = version.rpartition("/")
    parameters = [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}]
    called = {"group": group, "version": bare, "kind": kind}
    return f"/{plural(kind)}/{{name}}", {"patch": {"x-kubernetes-group-version-kind": called, "parameters": parameters}}
