"""Kinds of values in the cluster file, such as sizes and addresses. Their errors contain the allowed values."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
MOST_BYTES = 2**50
HUB_PREFIX = "hf:"
_HUB_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REVISION = r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,127}"
HUB_NAME = re.compile(rf"hf:({_HUB_PART}/{_HUB_PART})(?:@({_REVISION}))?(?::([A-Za-z0-9_]{{1,32}}))?")
HOST = re.compile(r"[A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]")
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(value: object) -> int:
    """Parse `256MiB`, `1.5GB` or a number of bytes. Raises ValueError."""
    size: float = 0
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := SIZE.fullmatch(value.strip())) and match[2].upper() in UNITS:
        size = float(match[1]) * UNITS[match[2].upper()]
    if not 1 <= size <= MOST_BYTES:
        raise ValueError("must be a size such as 256MiB or a number of bytes, above 0 and at most 1024TiB")
    return int(size)


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of the Hugging Face Hub: `repo` is `org/name`; `revision` is a branch, tag or commit, None for main.
    `kind` is the type of a GGUF file in it, such as `Q4_K_M`.
    """

    repo: str
    revision: str | None
    kind: str | None = None


def parse_hub_name(path: str) -> HubName | None:
    """Parse `hf:org/name[@revision][:kind]`; return None without the prefix. Raises ValueError."""
    if not path.startswith(HUB_PREFIX):
        return None
    match = HUB_NAME.fullmatch(path)
    if match is None or any(twice in path for twice in ("..", "--", "//")):
        text = "must be hf:org/name or hf:org/name@revision, such as hf:Qwen/Qwen3-0.6B@main"
        raise ValueError(f"{text}, and may end with :KIND of a GGUF file")
    return HubName(match[1], match[2], match[3])


def split_address(text: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`. Raises ValueError."""
    host, separator, port = text.rpartition(":")
    if not separator or not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ValueError("must be host:port, such as 127.0.0.1:50051; port 0 means any free port")
    return host.strip("[]"), int(port)


def parse_address(value: object) -> str:
    """Return the address unchanged if it is valid. Raises ValueError."""
    text = value if isinstance(value, str) else ""
    split_address(text)
    return text


def parse_host(value: object) -> str:
    """Return a host name or address without a port unchanged if it is valid. Raises ValueError."""
    if not isinstance(value, str) or not HOST.fullmatch(value):
        raise ValueError("must be a host without a port, such as worker-0.example, 10.0.0.5 or [::1]")
    return value


def parse_origin(origin: str) -> str:
    """Return a valid origin as browsers send it: in lower case, without the default port. Raises ValueError."""
    scheme, _, place = origin.lower().partition("://")
    host, _, port = place.partition(":")
    if int(port or 0) > 65535:
        raise ValueError("port must be at most 65535")
    return f"{scheme}://{host}" if (scheme, port) in {("http", "80"), ("https", "443")} else origin.lower()


def is_loopback(address: str) -> bool:
    """Return True if only this machine can reach the address."""
    return is_loopback_host(split_address(address)[0])


def is_loopback_host(host: str) -> bool:
    """Return True if only this machine can reach the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# For editors: patterns without syntax that only Python has.
_SIZES: list[dict[str, object]] = [
    {"type": "integer", "minimum": 1, "maximum": MOST_BYTES},
    {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*([Bb]|[KkMmGg][Ii]?[Bb]|[Tt][Ii][Bb])?\s*$"},
]
Auto = Literal["auto"]
Size = Annotated[int, BeforeValidator(parse_size), WithJsonSchema({"anyOf": _SIZES})]
SizeOrAuto = Annotated[
    int | Auto,
    BeforeValidator(lambda value: value if value == "auto" else parse_size(value)),
    WithJsonSchema({"anyOf": [{"const": "auto"}, *_SIZES]}),
]
Address = Annotated[
    str, BeforeValidator(parse_address), WithJsonSchema({"type": "string", "pattern": "^.+:[0-9]{1,5}$"})
]
Origin = Annotated[
    str,
    Field(pattern=r"^(\*|https?://[A-Za-z0-9_.-]{1,253}(:[0-9]{1,5})?)$"),
    AfterValidator(parse_origin),
]
Host = Annotated[str, BeforeValidator(parse_host), WithJsonSchema({"type": "string", "pattern": f"^({HOST.pattern})$"})]
Label = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9]([A-Za-z0-9_./-]*[A-Za-z0-9])?$")]
NodeLabels = dict[Label, Label]
ModelName = Annotated[str, Field(pattern=r"^[!-~]{1,128}$")]
Interface = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:@-]{1,15}$")]
# Generous limits; larger values fail in clocks, sockets or arrays far from here.
Seconds = Annotated[float, Field(gt=0, le=1e6)]
Milliseconds = Annotated[float, Field(gt=0, le=1e9)]
Processes = Annotated[int, Field(gt=0, le=4096)]  # or threads
Workers = Annotated[int, Field(ge=0, le=4096)]
Tokens = Annotated[int, Field(gt=0, le=2**20)]  # of one step, or of one block
Rows = Annotated[int, Field(gt=0, le=2**14)]
