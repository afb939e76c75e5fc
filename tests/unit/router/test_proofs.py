"""The delivery of a choice that is computed again for its receipt."""

import threading
from types import SimpleNamespace

import pytest

from baton.core import Sampling, SequenceSpec, Token
from baton.errors import EngineFault
from baton.rpc.v1 import inference_pb2 as pb
from router.request import proofs
from router.request.proofs import RepeatedDelivery, prove


def tokens(*ids):
    return [Token(index, each, "") for index, each in enumerate(ids)]


def test_only_the_rest_is_due_and_all_tokens_are_kept():
    delivery = RepeatedDelivery((7, 8))
    assert delivery.ids == []
    assert delivery.merge(tokens(7)) == []
    assert delivery.merge(tokens(7, 8, 9)[1:]) == tokens(7, 8, 9)[2:]
    delivery.complete()
    assert delivery.ids == [7, 8, 9]


def test_other_or_fewer_tokens_than_the_client_has_are_a_fault():
    with pytest.raises(EngineFault, match=r"^token 1 of the answer, computed again, differs from the one in received;"):
        RepeatedDelivery((7, 8)).merge(tokens(7, 9))
    delivery = RepeatedDelivery((7, 8))
    delivery.merge(tokens(7))
    with pytest.raises(EngineFault, match="computed again, has 1 tokens, but the client has 2"):
        delivery.complete()


@pytest.mark.parametrize(("prompt", "count", "in_thread"), [(1, 4095, False), (1, 4096, True), (4096, 1, True)])
async def test_long_prompts_and_answers_are_proved_outside_the_event_loop(monkeypatch, prompt, count, in_thread):
    monkeypatch.setattr(proofs, "audit_digest", lambda *_: threading.current_thread().name)
    parsed = SimpleNamespace(spec=SequenceSpec((1,) * prompt, Sampling(), deterministic=True), issuer=None)
    delivery = RepeatedDelivery(())
    delivery.merge(tokens(*range(count)))
    await prove(completed := pb.Completed(), SimpleNamespace(parsed=parsed), [(delivery, SimpleNamespace())])  # type: ignore[list-item,arg-type]
    assert (completed.usage.audit_digest != threading.current_thread().name) is in_thread
