"""Formats of an API server other than plain JSON objects: discovery documents, protobuf of Secrets, and patches."""

import base64
import copy
import re
from collections.abc import Mapping
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

Object = dict[str, Any]
MAGIC = b"k8s\x00"
# Keys by which strategic merge patches find list elements: the first one that all elements have.
MERGE_KEYS = ("name", "containerPort", "mountPath", "port", "topologyKey")
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


# --- protobuf and patches


def decode_protobuf(raw: bytes) -> Object:
    """Decode a Secret in Kubernetes' envelope, in which helm's typed client stores its releases."""
    envelope = dict(_fields(raw.removeprefix(MAGIC)))
    assert dict(_fields(envelope[1])) == {1: b"v1", 2: b"Secret"}
    metadata: Object = {"labels": {}}
    data = {}
    for number, value in _fields(envelope[2]):
        if number == 1:
            _read_metadata(metadata, value)
        elif number == 2:
            key, content = _pair(value)
            data[key] = base64.b64encode(content).decode()
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}


def _read_metadata(metadata: Object, raw: bytes) -> None:
    for number, value in _fields(raw):
        if number == 1:
            metadata["name"] = value.decode()
        elif number == 11:
            key, text = _pair(value)
            metadata["labels"][key] = text.decode()


def _pair(raw: bytes) -> tuple[str, bytes]:
    entry = dict(_fields(raw))
    return entry[1].decode(), entry.get(2, b"")


def _fields(raw: bytes) -> list[tuple[int, Any]]:
    """Return number and value of each field, without a schema: all fields are unknown to an empty message."""
    fields = UnknownFieldSet(Empty.FromString(raw))
    return [(fields[at].field_number, fields[at].data) for at in range(len(fields))]


def merge_patch(old: Object, patch: Object, *, strategic: bool) -> Object:
    """Apply a patch by RFC 7386. `strategic`: find elements of lists by their keys, as far as this chart needs it."""
    new = copy.deepcopy(old)
    for key, value in patch.items():
        if key.startswith("$"):
            continue
        before = new.get(key)
        if value is None:
            new.pop(key, None)
        elif isinstance(value, dict):
            new[key] = merge_patch(before if isinstance(before, dict) else {}, value, strategic=strategic)
        elif strategic and isinstance(value, list) and isinstance(before, list):
            new[key] = _merge_list(before, value)
        else:
            new[key] = value
    return new


def _merge_list(old: list[Any], patch: list[Any]) -> list[Any]:
    everything = [*old, *patch]
    if not all(isinstance(item, dict) for item in everything):
        return patch
    by = next((key for key in MERGE_KEYS if all(key in item for item in everything)), None)
    if by is None:
        return patch
    merged = {item[by]: item for item in old}
    for item in patch:
        if item.get("$patch") == "delete":
            merged.pop(item[by], None)
        else:
            merged[item[by]] = merge_patch(merged.get(item[by], {}), item, strategic=True)
    return list(merged.values())
