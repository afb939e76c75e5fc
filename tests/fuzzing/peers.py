"""Messages between workers and the router are parsed or rejected by name. No frame exceeds the agreed size."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from baton.core import KVLayout
from baton.errors import BatonError, HandoffError, InvalidRequest
from baton.rpc import convert
from baton.rpc.convert import thinking_from_pb, thoughts_from_pb
from baton.rpc.v1 import common_pb2, worker_pb2
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer.handoff import TransferSettings
from kvtransfer.receive_loop import ReceiveLoop, inbound_of
from kvtransfer.wire import frame_of, refusal_from_pb, refusal_to_pb
from tests.fuzzing.common import FREELY, Target, messages, outcome

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=8, block_size=4, dtype="float32")
TOKEN_BYTES = LAYOUT.layer_token_bytes
RING = SimpleNamespace(slots=4, size=TOKEN_BYTES * 6)
KV = SimpleNamespace(layout=LAYOUT, total_blocks=8)
END: Any = SimpleNamespace(kv=KV, ring_of=lambda transport: RING, fingerprint="", settings=TransferSettings())
SHM: Any = SimpleNamespace(name="shm", one_sided=True)
HANDOFF = {"request_id": "a", "attempt": 1}
READERS: list[tuple[Any, Callable[[Any], object]]] = [
    (common_pb2.WorkerRef, convert.ref_from_pb),
    (common_pb2.HandoffId, convert.handoff_from_pb),
    (common_pb2.KVLayout, convert.layout_from_pb),
    (common_pb2.WorkerInfo, convert.info_from_pb),
    (common_pb2.Load, convert.load_from_pb),
    (worker_pb2.SequenceSpec, convert.spec_from_pb),
    (worker_pb2.OutputTokens, convert.tokens_from_pb),
    (worker_pb2.OutputFinish, convert.finish_from_pb),
    (worker_pb2.ThinkingState, thinking_from_pb),
    (worker_pb2.OutputThoughts, thoughts_from_pb),
    (pb.HandoffRefused, refusal_from_pb),
]


def read(message: Any, reader: Callable[[Any], object]) -> None:
    """The reader returns a value, or names the wrong fields."""
    _, error = outcome(lambda: reader(message), InvalidRequest)
    assert error is None or all(each.field and each.description for each in error.violations)


def told(intake: ReceiveLoop, command: pb.PeerCommand) -> None:
    """Read a command like a session's event loop, without the channel's thread. Raises BatonError."""
    match command.WhichOneof("command"):
        case "offer":
            handoff = convert.handoff_from_pb(command.offer.handoff)
            intake.open[handoff] = intake.inbound[handoff] = inbound_of(END, handoff, command.offer)[1]
            assert command.offer.skip < command.offer.known_tokens <= KV.total_blocks * LAYOUT.block_size
        case "frame":
            for message in (command.frame, *command.more):
                frame = intake.checked(message, intake.open)
                assert frame.spec.nbytes <= RING.size
                assert frame.inbound is None or frame.spec.end <= frame.inbound.known_tokens
                assert frame.spec.layer_begin < frame.spec.layer_end <= LAYOUT.layers
        case "commit":
            intake.claim(command)
        case "abort":
            intake.open.pop(convert.handoff_from_pb(command.abort.handoff), None)


def conversation(commands: list[Any]) -> None:
    """A receiver reads only offered frames, as many as it has slots. Nonsense ends the channel with a message."""
    intake = ReceiveLoop(END, None, None, SHM, lambda reply: None)  # type: ignore[arg-type]  # nothing is written
    for command in commands:
        _, error = outcome(lambda c=command: told(intake, c), BatonError)  # type: ignore[misc]
        if error is not None:
            assert refusal_from_pb(refusal_to_pb(error).refused).args
        if error is not None and not isinstance(error, HandoffError):
            return
        assert intake.announced <= RING.slots
        for inbound in intake.inbound.values():
            assert inbound.announced.nbytes <= inbound.known_tokens * LAYOUT.layers * TOKEN_BYTES


def from_bytes(data: bytes) -> None:
    """Test a message of the type that the first byte names, or commands, each after its length."""
    number = (data[0] if data else 0) % (2 * len(READERS))
    try:
        if number < len(READERS):
            kind, reader = READERS[number]
            read(kind.FromString(data[1:]), reader)
        else:
            conversation(_split(data[1:]))
    except DecodeError:
        pass  # gRPC's answer, or the end of a control socket


def _split(data: bytes) -> list[pb.PeerCommand]:
    commands = []
    while data:
        commands.append(pb.PeerCommand.FromString(data[1 : 1 + data[0]]))
        data = data[1 + data[0] :]
    return commands


def _offer(known_tokens: int, skip: int) -> pb.PeerCommand:
    return ParseDict({"offer": {"handoff": HANDOFF, "known_tokens": known_tokens, "skip": skip}}, pb.PeerCommand())


def _frame(**numbers: int) -> pb.PeerCommand:
    """Make a frame whose size matches its numbers."""
    command = ParseDict({"frame": {"handoff": HANDOFF, **numbers}}, pb.PeerCommand())
    spec = frame_of(command.frame)
    command.frame.nbytes = abs((spec.layer_end - spec.layer_begin) * (spec.end - spec.begin)) * TOKEN_BYTES
    return command


@st.composite
def _frames(draw: st.DrawFn) -> pb.PeerCommand:
    """Draw nearly right frames: small numbers, and mostly a matching size."""
    numbers = {name: draw(st.integers(0, 4)) for name in ("sequence", "layer_begin", "layer_end", "begin", "end")}
    command = _frame(**numbers)
    if draw(st.booleans()):
        command.frame.nbytes = draw(st.sampled_from([0, 1, 2**64 - 1]))
    return command


_OFFERS = st.builds(_offer, st.integers(0, 40), st.integers(0, 2))
_COMMANDS = st.one_of(_OFFERS, _frames(), _frames(), _frames(), messages(pb.PeerCommand.DESCRIPTOR))
_MESSAGES = st.sampled_from(READERS).flatmap(lambda row: st.tuples(messages(row[0].DESCRIPTOR), st.just(row[1])))


@FREELY
@given(st.lists(_COMMANDS, max_size=8), _MESSAGES)
def drawn(commands, message):
    conversation(commands)
    read(*message)


def _said(*commands: pb.PeerCommand) -> bytes:
    said = b"".join(bytes((each.ByteSize(),)) + each.SerializeToString() for each in commands)
    return bytes((len(READERS),)) + said


def _seeds() -> list[bytes]:
    several = [_frame(sequence=n, layer_end=1, begin=n, end=n + 1) for n in range(RING.slots + 1)]
    return [
        b"\1" + ParseDict(HANDOFF, common_pb2.HandoffId()).SerializeToString(),
        _said(_offer(20, 0), *several[:2]),
        _said(_offer(20, 0), *several),
        _said(_offer(20, 0), _frame(layer_end=3, end=4)),
        _said(_offer(1, 0), _frame(layer_end=1, end=4)),
        _said(_offer(20, 0), _frame(layer_begin=2, layer_end=4, end=1)),
        _said(_offer(20, 0), _frame(layer_begin=3, layer_end=3, end=1)),
        _said(_offer(KV.total_blocks * LAYOUT.block_size + 1, 0)),
        _said(_offer(4, 4)),
    ]


PEER = Target(from_bytes, drawn, _seeds())
