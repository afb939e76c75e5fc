"""Certificates and tokens for tests, and raw calls to every method of every service."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import baton.rpc.v1
from baton.config.schema import TlsConfig
from tests.support.time_factor import scaled

TOKENS = {name: f"{name}-token-0123456789" for name in ("alice", "bob", "admin")}
WRONG_TOKEN = "nobody-token-0123456789"


def token_file(path, **limits):
    """Write the tokens of Alice, Bob (two tenants) and an admin. `limits` are Alice's. Return the path."""
    alice = f"{{token: {TOKENS['alice']}, tenant: alice, limits: {limits}}}".replace("'", "")
    digest = hashlib.sha256(TOKENS["bob"].encode()).hexdigest()
    bob = f"{{token_sha256: {digest}, tenant: bob}}"
    path.write_text(f"tokens:\n- {alice}\n- {bob}\n- {{token: {TOKENS['admin']}, tenant: operators, role: admin}}\n")
    return str(path)


def tls_of(folder):
    """Return the TLS configuration of a process with the certificates in this folder."""
    return TlsConfig.model_validate({part: f"{folder}/{part}.pem" for part in ("cert", "key", "ca")})


def bearer(name):
    """Return the metadata of a call by `name`, or with a wrong token if `name` is unknown."""
    return None if name is None else (("authorization", f"Bearer {TOKENS.get(name, WRONG_TOKEN)}"),)


def methods(*files: Any) -> list[str]:
    """Return the full names of all methods of all services of these files."""
    services = [service for file in files for service in file.services_by_name.values()]
    return [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]


def baton_files() -> Iterator[Any]:
    """Yield every file of Baton's protocol. New files are included automatically."""
    for module in iter_modules(baton.rpc.v1.__path__):
        if module.name.endswith("_pb2"):
            yield import_module(f"baton.rpc.v1.{module.name}").DESCRIPTOR


OTHERS = (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
LISTENERS = {  # the services of each listener; a new service must be added, or the test fails
    "public": ("baton.v1.Inference", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"),
    "admin": ("baton.v1.Admin", "grpc.reflection.v1alpha.ServerReflection"),
    "worker": ("baton.v1.Worker", "baton.v1.Peer"),
}


def methods_of(listener: str) -> list[str]:
    return [name for name in methods(*baton_files(), *OTHERS) if name.split("/")[1] in LISTENERS[listener]]


@dataclass(frozen=True)
class Answer:
    """The result of a call: a status, or None if a message came. `of_baton`: the status has Baton's details."""

    code: grpc.StatusCode | None
    of_baton: bool = False

    @property
    def reached(self) -> bool:
        """Whether the service itself has answered."""
        C = grpc.StatusCode
        if self.code in {C.UNIMPLEMENTED, C.UNAVAILABLE}:  # with Baton's details: there is no controller
            return self.of_baton
        return self.code not in {C.UNAUTHENTICATED, C.PERMISSION_DENIED, C.DEADLINE_EXCEEDED}


def ask(channel: grpc.Channel, method: str, metadata=None) -> Answer:
    """Send one empty message. All four kinds of calls look the same on the wire."""
    stub: Any = channel.stream_stream(method)
    call = stub(iter([b""]), metadata=metadata, timeout=scaled(10))
    try:
        next(call, None)
    except grpc.RpcError as error:
        failed: Any = error
        return Answer(failed.code(), "grpc-status-details-bin" in dict(failed.trailing_metadata() or ()))
    finally:
        call.cancel()
    return Answer(None)
