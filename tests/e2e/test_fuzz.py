"""Any message to any public method returns an answer or a typed error. The same processes then still serve."""

import contextlib
import os

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.errors import BatonError
from baton.rpc.status import from_rpc_error
from baton.rpc.v1 import inference_pb2 as pb
from tests.fuzzing.common import messages
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("oracle")]
SERVICE = pb.DESCRIPTOR.services_by_name["Inference"]
EXAMPLES = int(os.environ.get("BATON_FUZZ", "60"))
PATIENCE_S = 5.0  # most messages are rejected; some requests may well run forever
# The codes that a caller may get. Others are faults of the server, or do not name the mistake.
NAMES = "OK INVALID_ARGUMENT NOT_FOUND RESOURCE_EXHAUSTED CANCELLED DEADLINE_EXCEEDED"
FINE = {grpc.StatusCode[name] for name in NAMES.split()}


def called(channel: grpc.Channel, method, message) -> grpc.StatusCode:
    """Call the method and return its status. Streams are left after their first events."""
    path, answer = f"/{SERVICE.full_name}/{method.name}", GetMessageClass(method.output_type)
    codec = {"request_serializer": type(message).SerializeToString, "response_deserializer": answer.FromString}
    try:
        if not method.server_streaming:
            channel.unary_unary(path, **codec)(message, timeout=PATIENCE_S)
            return grpc.StatusCode.OK
        call = channel.unary_stream(path, **codec)(message, timeout=PATIENCE_S)
        for number, _ in enumerate(call):
            if number == 20:
                call.cancel()
        return grpc.StatusCode.OK
    except grpc.RpcError as error:
        typed = from_rpc_error(error)
        assert isinstance(typed, BatonError)
        assert str(typed), "an error without a word"
        return error.code()


def aimed(kind):
    """Draw messages that pass the first check. Most random messages fail at the model's name."""

    def tame(message):
        request = message.request if isinstance(message, pb.ResumeRequest) else message
        if isinstance(request, pb.GenerateRequest):
            request.model = ""
            request.ClearField("constraint") if request.constraint.ByteSize() == 0 else None
            with contextlib.suppress(ValueError):
                request.sampling.max_tokens = min(max(request.sampling.max_tokens, 1), 8)
            if not request.HasField("token_ids"):
                request.text = "x"
        elif "model" in message.DESCRIPTOR.fields_by_name:
            message.model = ""
        return message

    return messages(kind).map(tame)


@pytest.mark.sample(3)
@pytest.mark.parametrize("method", list(SERVICE.methods), ids=lambda method: method.name)
def test_any_message(oracle_cluster, method):
    pids = {name: identity.pid for name, identity in oracle_cluster.state().processes.items()}
    ended: set[grpc.StatusCode] = set()
    kind = method.input_type

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(message=st.one_of(messages(kind), aimed(kind)))
    def run(message):
        code = called(channel, method, message)
        assert code in FINE, f"{code} for {message}"
        ended.add(code)

    with grpc.insecure_channel(oracle_cluster.state().grpc) as channel:
        run()
    print(sorted(code.name for code in ended))
    assert pids == {name: identity.pid for name, identity in oracle_cluster.state().processes.items()}
    with oracle_cluster.client() as client:
        assert len(client.generate("hello", max_tokens=5, temperature=0, ignore_eos=True).tokens) == 5
    eventually(lambda: all(load.blocks.available == load.blocks.total for load in oracle_cluster.loads().values()))
