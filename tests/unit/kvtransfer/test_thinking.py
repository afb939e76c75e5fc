"""The thinking state in a handoff arrives bit for bit over real streams, or is rejected with the field's name."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.core import ThinkingState
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import worker_pb2 as worker
from kvtransfer.sender import GrpcPeerStream
from kvtransfer.transports.shm import ShmTransport
from kvtransfer.transports.unix_socket import MAX_PACKET
from tests.support.transports import served
from tests.unit.kvtransfer.byhand import JOB, Call, Receiver
from tests.unit.kvtransfer.support import make_end, same_kv

TRANSPORTS = {"memory": lambda memory: [memory], "shm": lambda memory: [ShmTransport()]}
SMALL, LARGE = MAX_PACKET // 32, MAX_PACKET * 32  # state bytes: below and above a control packet's limit


def state_of(nbytes: int, *, rows: int = 0, thoughts: int = 2) -> ThinkingState:
    """Return a state of random bytes, which include every byte value."""
    generator = torch.Generator().manual_seed(nbytes + rows)
    noise = [bytes(torch.randint(256, (n,), generator=generator, dtype=torch.uint8).numpy()) for n in (nbytes, rows)]
    made = tuple((n, 2**32 - 1 - n) if n % 2 else () for n in range(thoughts))
    return ThinkingState("t" * 64, thoughts, 3, bytes(range(256)) + noise[0][256:], noise[1], made)


STATES = {
    "none": None,
    "small": state_of(SMALL),
    "with rows": state_of(SMALL, rows=512, thoughts=0),
    "large": state_of(LARGE),
    "large with rows and thoughts": state_of(LARGE, rows=LARGE, thoughts=5000),
}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_states_arrive_bit_for_bit_over_grpc(pairs, transport: str) -> None:
    where: list[str] = []
    over = TRANSPORTS[transport]
    pair = pairs(send=over, recv=over, connect=lambda address, *callbacks: GrpcPeerStream(where[0], *callbacks))
    with served(pair.peer) as address:
        where.append(address)
        for name, thinking in STATES.items():
            job = pair.begin(name, 8, [11, 12])
            pair.complete(job, [1, 2], replace(make_end(8), thinking=thinking))
            assert pair.table.commits[job.handoff].thinking == thinking, name
        assert same_kv(pair.source, [1, 2], pair.target, [11, 12], 8)
        pair.sender.close()


@pytest.fixture
def call() -> Iterator[Call]:
    with Receiver() as receiver:
        yield receiver.call().offered().arrived()


RIGHT: dict[str, Any] = {"thinker": "t", "chunk": 2, "offset": 0, "state": b"state"}


@pytest.mark.parametrize(
    ("change", "commit", "named"),
    [
        ({"thinker": ""}, {}, "thinking.thinker: must not be empty"),
        ({"state": b""}, {}, "thinking.state: must not be empty"),
        ({"thoughts": [common.TokenIds(ids=[1])] * 3}, {}, "thinking.thoughts: must be at most 2"),
        ({}, {"spec": None, "first": None}, "thinking: must not be set"),  # no decode follows
    ],
)
def test_a_state_that_makes_no_sense_is_refused_by_name_and_ends_the_channel(call: Call, change, commit, named) -> None:
    call.commit(thinking=worker.ThinkingState(**{**RIGHT, **change}), **commit)
    call.refused("FRAME", named)
    assert not call.receiver.table.commits


def test_any_other_state_is_for_the_engine_to_judge(call: Call) -> None:
    call.commit(thinking=worker.ThinkingState(**RIGHT))
    assert call.hear() == "commit_ack"
    assert call.receiver.table.commits[JOB.handoff].thinking == ThinkingState(**RIGHT)
