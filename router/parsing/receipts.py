"""Fields that go with `receipt`: those that it implies, and those that it excludes."""

from __future__ import annotations

from collections.abc import Iterator

from baton.core import SequenceSpec
from baton.errors import InvalidRequest, Violation
from baton.receipts.issuer import Issuer
from baton.rpc.v1 import inference_pb2 as pb

_NO_KEY = "not available: the cluster file of this router sets no security.receipt_key"
_PROMPT = "cannot be combined with receipt, which does not cover log-probabilities of the prompt"
_REASONING = "cannot be combined with receipt if the prompt ends inside reasoning, because a replay cannot repeat it"


def with_implied(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """Set `deterministic` and `logprobs: 0` in a request for a receipt, unless it sets them, and return it."""
    request.deterministic = request.deterministic or not request.HasField("deterministic")
    request.logprobs = request.logprobs  # 0 unless set
    return request


def receipt_violations(request: pb.GenerateRequest, issuer: Issuer | None) -> Iterator[Violation]:
    """Yield the fields of a request for a receipt that exclude it, after `with_implied`."""
    if issuer is None:
        yield Violation("receipt", _NO_KEY)
    if not request.deterministic:
        yield Violation("deterministic", "must be omitted or true with receipt, whose answer can be computed again")
    if request.HasField("prompt_logprobs"):
        yield Violation("prompt_logprobs", _PROMPT)


def issuer_for(spec: SequenceSpec, issuer: Issuer | None) -> Issuer | None:
    """Return the issuer of a request for a receipt. Raises InvalidRequest if its prompt excludes one."""
    if spec.constraint is not None and spec.constraint.after:
        raise InvalidRequest.of("constraint", _REASONING)
    return issuer
