"""CUDA IPC between two processes, and a model that thinks: `python -m pytest tests/unit/gpu/test_one_gpu.py`.

Needs a machine with one GPU. Not run yet, because no GPU was available.
`tests/unit/kvtransfer/transports/test_cuda_ipc.py` tests the protocol without a GPU.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from baton.engine.engine import Engine
from baton.engine.kernels.gpu.cuda_memory import CudaDevice
from baton.engine.kv_cache import KVCache
from baton.engine.models.loading import load_model
from baton.errors import ChannelBroken
from baton.tokenizer import load_tokenizer
from kvtransfer.handoff import TransferSettings
from kvtransfer.transports.base import Side
from kvtransfer.transports.select import make_transports
from tests.integration.channel_peer import RING, Peer, frame
from tests.support.engines import key_of, kv_of, run, spec_of
from tests.unit.kvtransfer.support import LAYOUT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and torch built for CUDA")
FRAMES = 40
Start = Callable[..., Peer]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts the other end. At the end it is killed and this end is closed."""
    with ExitStack() as stack:

        def start(side: Side, *flags: str, deadline_s: float = 20.0) -> Peer:
            peer = Peer(side, *flags, transport="cuda_ipc", device="cuda:0", deadline_s=deadline_s)
            stack.callback(peer.end.close)
            stack.callback(peer.stop)
            return peer

        yield start


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info(0)[0]


def test_frames_from_another_process(start: Start) -> None:
    peer = start(Side.RECEIVER, "--frames", str(FRAMES))
    assert peer.end.slot(0).device == torch.device("cuda", 0)
    assert all(peer.take(number) for number in range(FRAMES))


def test_frames_to_another_process(start: Start) -> None:
    peer = start(Side.SENDER)
    for number in range(FRAMES):
        if number >= RING.slots:
            assert peer.credit() == number - RING.slots
        peer.give(number)
    assert [peer.credit() for _ in range(RING.slots)] == list(range(FRAMES - RING.slots, FRAMES))


def test_a_frame_waits_for_the_work_that_fills_it(start: Start) -> None:
    """The kernel that fills the slot runs long. The other process must not read before its end."""
    peer, data = start(Side.SENDER), frame(0).to("cuda:0")
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    peer.end.slot(0)[: len(data)].copy_(data)  # queued behind the sleep
    peer.wire.say(number=0, nbytes=len(data))
    peer.end.start(0, len(data))
    assert peer.credit() == 0  # its digest was compared


@pytest.mark.parametrize("side", list(Side))
def test_a_killed_peer_is_seen_at_once_and_its_memory_comes_back(start: Start, side: Side) -> None:
    first = start(side)  # creates CUDA's per-process state
    first.end.close()
    first.kill()
    before = free_bytes()
    peer = start(side, "--frames", "1")
    if side is Side.RECEIVER:
        assert peer.take(0)
    peer.kill()
    killed = time.monotonic()
    with pytest.raises(ChannelBroken):
        peer.end.start(1, 8)
    assert time.monotonic() - killed < 10.0  # half of the deadline
    peer.end.close()
    assert before - free_bytes() < RING.nbytes


def test_a_frozen_sender_is_given_up_by_the_deadline(start: Start) -> None:
    peer = start(Side.RECEIVER, "--frames", "1", deadline_s=5.0)
    assert peer.take(0)
    peer.process.send_signal(signal.SIGSTOP)
    peer.end.start(1, 8)
    with pytest.raises(ChannelBroken, match="no progress"):
        peer.end.finish(1)


def test_auto_takes_cuda_ipc_first() -> None:
    transports = make_transports(TransferSettings(), KVCache(LAYOUT, 1, torch.device("cuda", 0)))
    assert [transport.name for transport in transports] == ["cuda_ipc", "nccl"]
    assert transports[0].reach.endswith(CudaDevice(torch.device("cuda")).uuid)


COIN = Path(__file__).parents[3] / "models" / "coin"
SENTENCE = "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:"


def answer(mode, device):
    """Return text and thoughts, and, as numbers, the state of a handoff with one token fewer."""
    tokenizer = load_tokenizer(COIN)
    engine = Engine(load_model(COIN, device=device, thinking=mode), tokenizer, total_blocks=64)
    prompt = tokenizer.encode(SENTENCE)
    kv_of(engine, spec_of(prompt[:-1]))
    carried = engine.thinking_state(key_of())
    assert carried is not None
    engine.release(key_of())
    found = run(engine, [spec_of(prompt, max_tokens=6, ignore_eos=False)])
    text = "".join(token.text for token in found.tokens[key_of(0)])
    return text, found.thoughts[key_of(0)], torch.frombuffer(bytearray(carried.state), dtype=torch.float32)


@pytest.mark.parametrize("mode", ["auto", "fast", "sequential"])
def test_a_model_thinks_on_a_gpu_as_on_a_cpu(mode):
    text, thoughts, state = answer("sequential", "cpu")
    there = answer(mode, "cuda:0")
    assert there[:2] == (text, thoughts)
    torch.testing.assert_close(there[2], state, atol=1e-3, rtol=1e-3)
