"""The table of errors and statuses, both ways, and statuses of foreign servers."""

import errno

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from baton import errors
from baton.errors import BatonError, InvalidRequest, Overloaded, RateLimited, Violation
from baton.limits import MAX_STATUS_VIOLATIONS
from baton.rpc.status import CODES, from_rpc_error, request_id_of, to_rpc_status

Code = grpc.StatusCode
DETAILS = "grpc-status-details-bin"


def failure(code: Code, text: str | None, *details: bytes) -> aio.AioRpcError:
    """Return a failed call, as gRPC would raise it."""
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*((DETAILS, each) for each in details)), text)


def as_failure(status: status_pb2.Status) -> aio.AioRpcError:
    code = next(code for code in Code if code.value[0] == status.code)
    return failure(code, status.message, status.SerializeToString())


def over_the_wire(error: BaseException, request_id: str = "") -> aio.AioRpcError:
    return as_failure(to_rpc_status(error, request_id))


VISIBLE: list[tuple[BatonError, Code]] = [
    (InvalidRequest(Violation("a.b", "must be 1"), Violation("c", "must be 2")), Code.INVALID_ARGUMENT),
    (errors.UnknownModel("no model 'x'"), Code.NOT_FOUND),
    (errors.Unauthenticated("no token"), Code.UNAUTHENTICATED),
    (errors.PermissionDenied("not yours"), Code.PERMISSION_DENIED),
    (errors.Unsupported("Resume is not offered"), Code.UNIMPLEMENTED),
    (Overloaded("queue is full", retry_after_s=2.25), Code.RESOURCE_EXHAUSTED),
    (RateLimited("too many", retry_after_s=2.25), Code.RESOURCE_EXHAUSTED),
    (errors.PromiseRefused("not now", 2.25, ttft_ms=350.5, itl_ms=20.25), Code.RESOURCE_EXHAUSTED),
    (errors.DeadlineExceeded("too late"), Code.DEADLINE_EXCEEDED),
    (errors.Cancelled("gone"), Code.CANCELLED),
    (errors.NoWorker("none lives"), Code.UNAVAILABLE),
    (errors.WorkerLost("d0 died"), Code.UNAVAILABLE),
    (errors.EngineFault("NaN"), Code.INTERNAL),
]
FAULTS = [errors.ConfigError, errors.CheckpointError, errors.RankLost, BatonError, KeyError]
LOSSES = [errors.HandoffError, errors.StaleAttempt, errors.OfferRefused, errors.DigestMismatch, errors.ChannelBroken]
REPLACED: list[tuple[BaseException, type[BatonError]]] = [
    *((kind("secret"), errors.EngineFault) for kind in FAULTS),
    *((kind("secret"), errors.WorkerLost) for kind in LOSSES),
    (errors.LedgerError("redis://:secret@host"), errors.NoWorker),
    (RuntimeError("secret"), errors.EngineFault),
    (OSError(errno.EIO, "secret"), errors.EngineFault),
    (RuntimeError("can't start new thread"), errors.Overloaded),
    (MemoryError("secret"), errors.Overloaded),
    *((OSError(number, "secret"), errors.Overloaded) for number in (errno.EMFILE, errno.ENOMEM, errno.ENOSPC)),
]


def tree(kind: type[BatonError]) -> set[type[BatonError]]:
    return {kind}.union(*(tree(child) for child in kind.__subclasses__()))


def test_every_class_of_the_tree_is_here():
    listed = {type(error) for error, _ in VISIBLE} | {type(error) for error, _ in REPLACED}
    ours = {kind for kind in tree(BatonError) if kind.__module__ == BatonError.__module__}  # tests add more
    assert ours - listed == set()
    assert {type(error) for error, _ in VISIBLE} == set(CODES)


@pytest.mark.parametrize(("error", "code"), VISIBLE, ids=lambda value: type(value).__name__)
def test_an_error_survives_the_wire(error: BatonError, code: Code):
    failed = over_the_wire(error)
    back = from_rpc_error(failed)
    assert failed.code() is code
    assert (type(back), str(back), back.retryable) == (type(error), str(error), error.retryable)
    assert vars(back) == vars(error)  # violations, retry_after_s


@pytest.mark.parametrize(("error", "shown"), REPLACED, ids=lambda value: type(value).__name__)
def test_what_clients_must_not_see_is_replaced(error: BaseException, shown: type[BatonError]):
    back = from_rpc_error(over_the_wire(error))
    assert type(back) is shown
    assert "secret" not in str(back)


@pytest.mark.parametrize("name", ["r-1", ""])
def test_details_say_reason_domain_request_and_whether_a_retry_helps(name: str):
    info = error_details_pb2.ErrorInfo()
    assert to_rpc_status(errors.WorkerLost("x")).details[0].Unpack(info)
    assert (info.reason, info.domain, dict(info.metadata)) == ("WorkerLost", "baton", {"retryable": "true"})
    assert request_id_of(over_the_wire(errors.Overloaded("x", 1.0), name)) == name
    assert request_id_of(failure(Code.INTERNAL, "others")) == request_id_of(grpc.RpcError()) == ""


BY_DETAILS = (
    errors.NoWorker,
    errors.WorkerLost,
    errors.PromiseRefused,
    RateLimited,
)  # their code alone has another meaning


@pytest.mark.parametrize(
    ("code", "words", "kind"),
    [
        *((code, "some words", type(error)) for error, code in VISIBLE if not isinstance(error, BY_DETAILS)),
        (Code.FAILED_PRECONDITION, "some words", InvalidRequest),
        (Code.RESOURCE_EXHAUSTED, "Received message larger than max (5 vs. 4)", InvalidRequest),
        (Code.RESOURCE_EXHAUSTED, "received metadata size exceeds soft limit (9506 vs. 8192)", InvalidRequest),
        (Code.CANCELLED, "Locally cancelled by application!", errors.Cancelled),
        (Code.CANCELLED, "Channel closed!", errors.Cancelled),
        (Code.ABORTED, "some words", errors.WorkerLost),
        (Code.UNKNOWN, "some words", errors.EngineFault),
        (Code.DATA_LOSS, "some words", errors.EngineFault),
        (Code.INTERNAL, None, errors.EngineFault),
    ],
)
def test_plain_statuses(code: Code, words: str | None, kind: type[BatonError]):
    back = from_rpc_error(failure(code, words))
    assert type(back) is kind
    assert (words or code.name) in str(back)
    assert isinstance(from_rpc_error(grpc.RpcError("odd")), errors.EngineFault), "not even a code"


@pytest.mark.parametrize(
    ("code", "text"),
    [(Code.UNAVAILABLE, "Connection refused"), (Code.CANCELLED, "CANCELLED")],
    ids=["away", "dropped by a server that stops"],
)
def test_what_is_worth_a_retry_without_details_names_the_address(code: Code, text: str):
    away = failure(code, text)
    before, after = from_rpc_error(away, "host:1"), from_rpc_error(away, "host:1", connected=True)
    assert (type(before), str(before)) == (errors.NoWorker, f"cannot reach host:1: {text}")
    assert (type(after), str(after)) == (errors.WorkerLost, f"the connection to host:1 was lost: {text}")


@pytest.mark.parametrize(
    "trailer", [b"\xff not protobuf", status_pb2.Status(code=5, message="other").SerializeToString()]
)
def test_details_that_do_not_belong_are_ignored(trailer: bytes):
    back = from_rpc_error(failure(Code.INTERNAL, "plain", trailer))
    assert (type(back), str(back)) == (errors.EngineFault, "plain")


def test_details_of_others_are_used_but_not_their_reasons_nor_broken_ones():
    foreign = status_pb2.Status(code=Code.RESOURCE_EXHAUSTED.value[0], message="slow down")
    foreign.details.add(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff")
    foreign.details.add().Pack(error_details_pb2.ErrorInfo(reason="EngineFault", domain="proxy.example"))
    assert isinstance(from_rpc_error(as_failure(foreign)), Overloaded)
    foreign.details.add().Pack(error_details_pb2.RetryInfo(retry_delay={"seconds": 3}))
    back = from_rpc_error(as_failure(foreign))
    assert isinstance(back, Overloaded)
    assert back.retry_after_s == 3.0


@pytest.mark.parametrize("long", ["x" * 10**4, "é" * 10**4, "\ud800" * 10**4])
def test_long_texts_fit_into_trailers(long: str):
    status = to_rpc_status(InvalidRequest(*[Violation(long, long)] * 100))
    bad = error_details_pb2.BadRequest()
    assert status.details[1].Unpack(bad)
    assert len(bad.field_violations) == MAX_STATUS_VIOLATIONS
    assert 3 * len(status.message.encode()) + len(status.SerializeToString()) * 4 / 3 < 8192
