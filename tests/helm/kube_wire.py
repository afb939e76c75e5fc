"""Formats of API server clients other than plain JSON: protobuf of a few kinds, and patches."""

from __future__ import annotations

import base64
import copy
from collections.abc import Iterator
from typing import Any

Object = dict[str, Any]
MAGIC = b"k8s\x00"
# Keys by which strategic merge patches find list elements: the first one that all elements have.
MERGE_KEYS = ("name", "containerPort", "mountPath", "port", "topologyKey")


def decode_protobuf(raw: bytes) -> Object:
    """Decode a Secret or ConfigMap in Kubernetes' envelope, in which helm's typed client stores its releases."""
    envelope = dict(_fields(raw.removeprefix(MAGIC)))
    meta = dict(_fields(_bytes(envelope[1])))
    kind = _bytes(meta[2]).decode()
    found: Object = {"apiVersion": _bytes(meta[1]).decode(), "kind": kind, "metadata": {"labels": {}}, "data": {}}
    for number, value in _fields(_bytes(envelope[2])):
        if number == 1:
            _read_metadata(found["metadata"], _bytes(value))
        elif number == 2:
            key, content = _pair(_bytes(value))
            found["data"][key] = base64.b64encode(content).decode() if kind == "Secret" else content.decode()
        elif number == 3 and kind == "Secret":
            found["type"] = _bytes(value).decode()
    return found


def _read_metadata(metadata: Object, raw: bytes) -> None:
    for number, value in _fields(raw):
        if number == 1:
            metadata["name"] = _bytes(value).decode()
        elif number == 11:
            key, text = _pair(_bytes(value))
            metadata["labels"][key] = text.decode()


def _pair(raw: bytes) -> tuple[str, bytes]:
    entry = dict(_fields(raw))
    return _bytes(entry[1]).decode(), _bytes(entry.get(2, b""))


def _bytes(value: int | bytes) -> bytes:
    assert isinstance(value, bytes)
    return value


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        if tag & 7 == 0:
            number, at = _varint(raw, at)
            yield tag >> 3, number
        else:
            assert tag & 7 == 2, f"wire type {tag & 7}"
            length, at = _varint(raw, at)
            yield tag >> 3, raw[at : at + length]
            at += length


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value, at


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
