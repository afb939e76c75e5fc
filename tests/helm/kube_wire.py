"""Formats of API server clients other than plain JSON: protobuf of Secrets, and patches."""

import base64
import copy
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

Object = dict[str, Any]
MAGIC = b"k8s\x00"
# Keys by which strategic merge patches find list elements: the first one that all elements have.
MERGE_KEYS = ("name", "containerPort", "mountPath", "port", "topologyKey")


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
