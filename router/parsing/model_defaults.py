"""The defaults of sampling that a checkpoint sets in its generation_config.json."""

from __future__ import annotations

import structlog
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from baton.errors import CheckpointError, InvalidRequest
from baton.rpc import convert
from baton.rpc.v1 import common_pb2
from baton.tokenizer import Tokenizer, read_object

log = structlog.get_logger(__name__)
_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(tokenizer: Tokenizer) -> common_pb2.Sampling:
    """Return the values of generation_config.json. `do_sample: false` means greedy. Raises CheckpointError."""
    defaults = common_pb2.Sampling()
    if tokenizer.folder is None:
        return defaults
    path = tokenizer.folder / "generation_config.json"
    config = read_object(path)
    found = {name: value for name in _FIELDS if (value := config.get(name)) is not None}
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    if found.get("top_k") == -1:
        found["top_k"] = 0  # other servers use -1 for "off"
    try:
        convert.sampling_from_pb(ParseDict(found, defaults))
    except (ParseError, OverflowError, InvalidRequest) as error:
        raise CheckpointError(f"{path}: {error}; correct it, or set model.generation_defaults to none") from None
    if found:
        log.info("generation_defaults", values=MessageToDict(defaults, preserving_proto_field_name=True))
    return defaults
