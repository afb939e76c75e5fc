"""Wire contract: messages, enums and services, from the descriptors."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)

from tools.face import product


def proto() -> Iterator[str]:
    """Yield the contract of all files."""
    for descriptor in product.proto_files():
        file = FileDescriptorProto()
        descriptor.CopyToProto(file)
        for message in file.message_type:
            yield from _message(f"{file.package}.{message.name}", message)
        for enum in file.enum_type:
            yield from _enum(f"{file.package}.{enum.name}", enum)
        for service in file.service:
            yield from _service(f"{file.package}.{service.name}", service)


def _message(name: str, message: DescriptorProto) -> Iterator[str]:
    yield f"message {name}"
    for field in message.field:
        inside = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
        yield f"field {name}.{field.name} = {field.number}: {_kind(field, inside)}"
    yield from (f"reserved {name} {part.start} to {part.end - 1}" for part in message.reserved_range)
    yield from (f"reserved {name} {word}" for word in message.reserved_name)
    for inner in message.nested_type:
        yield from _message(f"{name}.{inner.name}", inner)
    for enum in message.enum_type:
        yield from _enum(f"{name}.{enum.name}", enum)


def _kind(field: FieldDescriptorProto, oneof: str) -> str:
    label = FieldDescriptorProto.Label.Name(field.label).removeprefix("LABEL_").lower()
    kind = field.type_name.lstrip(".") or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.proto3_optional:
        return f"explicit optional {kind}"
    return f"{label} {kind}" + (f", oneof {oneof}" if oneof else "")


def _enum(name: str, enum: EnumDescriptorProto) -> Iterator[str]:
    yield f"enum {name}"
    yield from (f"value {name}.{value.name} = {value.number}" for value in enum.value)
    yield from (f"reserved {name} {part.start} to {part.end}" for part in enum.reserved_range)
    yield from (f"reserved {name} {word}" for word in enum.reserved_name)


def _service(name: str, service: ServiceDescriptorProto) -> Iterator[str]:
    yield f"service {name}"
    for method in service.method:
        takes = ("stream " if method.client_streaming else "") + method.input_type.lstrip(".")
        returns = ("stream " if method.server_streaming else "") + method.output_type.lstrip(".")
        yield f"method {name}.{method.name}({takes}) returns ({returns})"
