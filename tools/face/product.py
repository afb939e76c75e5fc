"""The parts of the product with its public face. Only this file of tools/face imports the product."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any, cast

import typer
from google.protobuf.descriptor import FileDescriptor
from pydantic import BaseModel
from starlette.routing import Route

import baton
import baton.client
import baton.client.types
import baton.errors
from baton.cli.app import app
from baton.cli.exit_codes import exit_code
from baton.config import ClusterConfig
from baton.errors import BatonError, InvalidRequest
from baton.rpc import v1
from baton.rpc.status import to_rpc_status
from router.openai.errors import Problem, problem_of
from router.openai.messages_api.schema import MessagesBody
from router.openai.responses_api.schema import ResponsesBody
from router.openai.schema import ChatBody, CompletionBody
from router.openai.server import Gateway, GatewaySettings
from router.openai.upstream import Upstream

PACKAGES = ("baton", "router", "prefill_workers", "decode_workers", "kvtransfer")
EXPORTED = baton.__all__
# Modules that users import names from, by their public path.
MODULES: Mapping[str, ModuleType] = {
    "baton.client": baton.client,
    "baton.client.types": baton.client.types,
    "baton.errors": baton.errors,
}
Error = BatonError


def command() -> Any:
    """Return the command `baton` with its subcommands. It is untyped because typer vendors its own click."""
    return typer.main.get_command(app)


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema of the cluster file."""
    return ClusterConfig.model_json_schema()


def body_schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON Schemas of the gateway's request bodies, by path."""
    bodies: dict[str, type[BaseModel]] = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}
    bodies |= {"/v1/messages": MessagesBody, "/v1/responses": ResponsesBody}
    return {path: body.model_json_schema() for path, body in bodies.items()}


def routes() -> list[Route]:
    """Return the gateway's routes. Its upstream is None because it receives no request."""
    gateway = Gateway(cast(Upstream, None), GatewaySettings())
    return [route for route in gateway.app().routes if isinstance(route, Route)]


def proto_files() -> list[FileDescriptor]:
    """Return the descriptors of all files of the wire contract."""
    names = sorted(module.name for module in pkgutil.iter_modules(v1.__path__) if module.name.endswith("_pb2"))
    return [importlib.import_module(f"{v1.__name__}.{name}").DESCRIPTOR for name in names]


def error_of(kind: type[BatonError]) -> BatonError:
    """Return an error of this class."""
    return InvalidRequest.of("field", "wrong") if issubclass(kind, InvalidRequest) else kind("wrong")


def grpc_code(error: BatonError) -> int:
    """Return the gRPC status that a client receives."""
    return int(to_rpc_status(error).code)


def http_problem(error: BatonError) -> Problem:
    """Return the HTTP error that a client receives."""
    return problem_of(error)


def exit_status(error: BatonError) -> int:
    """Return the exit code of the command line."""
    return exit_code(error)
