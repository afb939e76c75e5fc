"""The construction of a fuzz target, and random messages of any protobuf type, drawn from its descriptor."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import descriptor as pb
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
FREELY = settings(
    max_examples=40, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@dataclass(frozen=True)
class Target:
    """A fuzz target. `drawn` is a hypothesis test; `seeds` are valid and slightly invalid bytes."""

    from_bytes: Callable[[bytes], None]
    drawn: Any
    seeds: list[bytes]

    def __call__(self, data: bytes) -> None:
        """Test any bytes. After an even first byte, the rest is the input; after an odd one, hypothesis draws by it."""
        if data[:1] and data[0] % 2:
            self.drawn.hypothesis.fuzz_one_input(data[1:])
        else:
            self.from_bytes(data[1:])


def outcome(call: Callable[[], Any], *errors: type[Exception]) -> tuple[Any, Any]:
    """Return `(result, None)`, or `(None, error)` if `call` raises one of these errors."""
    try:
        return call(), None
    except errors as error:
        return None, error


# --- protobuf


DEPTH = 4
MOST = 3  # maximum number of entries of a repeated field
F = pb.FieldDescriptor

_ODD = ["", "\x00", "\n", "{}", "[", "oracle", "a" * 5000, "\U0001f600", "\u0301" * 20, "{{ 7 * 7 }}", "(a+)+$"]
TEXT = st.one_of(st.sampled_from(_ODD), st.text(max_size=20))
FLOATS = st.one_of(st.floats(width=32), st.sampled_from([0.0, 1.0, 0.5]))


def integers(bits: int, *, signed: bool) -> st.SearchStrategy[int]:
    """Draw any integer of that width; small values and the limits are the most frequent."""
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return st.one_of(st.integers(max(low, -2), 9), st.sampled_from([low, high]), st.integers(low, high))


SCALARS: dict[int, st.SearchStrategy[Any]] = {
    F.TYPE_STRING: TEXT,
    F.TYPE_BYTES: st.binary(max_size=20),
    F.TYPE_BOOL: st.booleans(),
    F.TYPE_FLOAT: FLOATS,
    F.TYPE_DOUBLE: FLOATS,
    F.TYPE_UINT32: integers(32, signed=False),
    F.TYPE_UINT64: integers(64, signed=False),
    F.TYPE_INT32: integers(32, signed=True),
    F.TYPE_SINT32: integers(32, signed=True),
    F.TYPE_INT64: integers(64, signed=True),
    F.TYPE_ENUM: st.integers(0, 9),
}


@st.composite
def messages(draw: st.DrawFn, kind: pb.Descriptor, depth: int = DEPTH) -> Message:
    """Draw a message of type `kind`. Some of its fields are set; of a oneof, the last drawn field stays."""
    message = GetMessageClass(kind)()
    for field in draw(st.permutations(list(kind.fields))):
        if draw(st.booleans()):
            _set(draw, message, field, depth)
    return message


def _set(draw: st.DrawFn, message: Message, field: pb.FieldDescriptor, depth: int) -> None:
    kind, value = field.message_type, getattr(message, field.name)
    if kind is not None and kind.GetOptions().map_entry:
        key, item = (SCALARS[kind.fields_by_name[name].type] for name in ("key", "value"))
        value.update(draw(st.dictionaries(key, item, max_size=MOST)))
    elif kind is not None and depth > 0:
        for _ in range(draw(st.integers(0, MOST)) if field.is_repeated else 1):
            inner = value.add() if field.is_repeated else value
            inner.SetInParent()
            inner.MergeFrom(draw(messages(kind, depth - 1)))
    elif kind is None and field.is_repeated:
        value.extend(draw(st.lists(SCALARS[field.type], max_size=MOST)))
    elif kind is None:
        setattr(message, field.name, draw(SCALARS[field.type]))
