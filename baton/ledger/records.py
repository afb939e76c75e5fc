"""What a worker writes about itself, as JSON, and back. Whatever does not fit is refused, field by field.

Unknown fields are ignored: a newer worker may say more than an older router understands.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from baton.core import Incarnation, KVLayout, Role, WorkerInfo, WorkerRef
from baton.limits import MAX_SYSTEM_FINGERPRINT_CHARS

MAX_EPOCH = 2**53 - 1  # Lua counts in doubles

_Count = Annotated[int, Field(ge=0, le=MAX_EPOCH)]
_Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
_Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class _Incarnation(_Model):
    epoch: Annotated[int, Field(ge=1, le=MAX_EPOCH)]
    counter: Annotated[int, Field(ge=1, le=MAX_EPOCH)]


class _Layout(_Model):
    layers: _Size
    kv_heads: _Size
    head_dim: _Size
    block_size: _Size
    dtype: Literal["float32", "bfloat16", "float16"]
    tensors: Annotated[tuple[_Name, ...], Field(min_length=1, max_length=8)]


class _Worker(_Model):
    worker_id: _Name
    incarnation: _Incarnation
    address: _Name
    role: Literal["prefill", "decode"]
    fingerprint: _Name
    model: Annotated[str, Field(min_length=1, max_length=4096)]
    max_model_len: _Size
    total_blocks: _Size
    layout: _Layout
    pid: _Count
    host: Annotated[str, Field(max_length=256)]
    protocol_version: _Size
    determinism: Annotated[str, Field(max_length=MAX_SYSTEM_FINGERPRINT_CHARS)] = ""  # older workers say neither
    nondeterminism: Annotated[str, Field(max_length=1024)] = ""
    thinking_chunk: _Count = 0
    metrics: Annotated[str, Field(max_length=256)] = ""


def worker_to_json(info: WorkerInfo) -> bytes:
    """Raises ValueError naming each field that no reader would accept."""
    fields = asdict(info)
    try:
        record = _Worker.model_validate(fields | fields.pop("ref") | {"role": info.role.value})
    except ValidationError as error:
        raise ValueError(_fields(error)) from None
    return record.model_dump_json().encode()


def worker_from_json(raw: bytes) -> WorkerInfo:
    """Inverse of `worker_to_json`. Raises ValueError naming each wrong field, without its content."""
    try:
        record = _Worker.model_validate_json(raw)
    except ValidationError as error:
        raise ValueError(_fields(error)) from None
    fields = record.model_dump()
    who = (fields.pop("worker_id"), Incarnation(**fields.pop("incarnation")), fields.pop("address"))
    role, layout = Role(fields.pop("role")), KVLayout(**fields.pop("layout"))
    return WorkerInfo(ref=WorkerRef(*who), role=role, layout=layout, **fields)


def _fields(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_input=False, include_context=False)
    return "; ".join(f"{'.'.join(str(part) for part in item['loc']) or 'record'}: {item['msg']}" for item in found)
