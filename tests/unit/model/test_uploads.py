"""Weights on their way to a GPU. A stand-in device fetches staged bytes as late as possible: when the thread waits for
it. A buffer that changes too early would change the weights.
"""

import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from baton.engine.models.checkpoint import Checkpoint, LoadProgress, Weights
from baton.engine.models.uploads import BUFFERS, Uploads
from tests.support.time_factor import scaled

BYTES = 4 * 7  # of a buffer
GPU = torch.device("cuda", 0)


class LateLane:
    """A lane whose copies happen when they are waited for. `fails` is the number of the copy that raises."""

    def __init__(self, fails: int | None = None) -> None:
        self.buffers: list[torch.Tensor] = []
        self.sent = self.under_way = self.most = 0
        self._fails = fails

    def buffer(self, nbytes: int) -> torch.Tensor:
        self.buffers.append(torch.empty(nbytes, dtype=torch.uint8))
        return self.buffers[-1]

    def send(self, place: torch.Tensor, staged: torch.Tensor) -> partial[None]:
        if self.sent == self._fails:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        assert (place.shape, place.dtype) == (staged.shape, staged.dtype)
        self.sent, self.under_way = self.sent + 1, self.under_way + 1
        self.most = max(self.most, self.under_way)
        return partial(self._arrive, place, staged)

    def _arrive(self, place: torch.Tensor, staged: torch.Tensor) -> None:
        place.copy_(staged)
        self.under_way -= 1


class GpuWeights(Weights):
    """Weights whose places on a GPU are in main memory."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, lane: LateLane) -> None:
        super().__init__(checkpoint, dtype, GPU)
        self.lane = lane

    def _place(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype)

    def _start_uploads(self) -> Uploads:
        return Uploads(self.lane, BYTES)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "weights"]


@pytest.fixture
def tensors(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {f"t{number}": torch.randn(rows, 3) for number, rows in enumerate([1, 40, 7, 13, 2, 2])}


@pytest.fixture
def weights(tmp_path: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("baton.engine.models.checkpoint.PIECE", 7)
    save_file(tensors, tmp_path / "model.safetensors")
    return partial(GpuWeights, Checkpoint(tmp_path, Mock()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_bytes_arrive_through_two_buffers(weights, tensors, dtype):
    with closing(weights(dtype, lane := LateLane())) as gpu:
        found = {name: gpu.tensor(name, *value.shape) for name, value in tensors.items()}
        gpu.settle()
        for name, value in tensors.items():
            assert torch.equal(found[name], value.to(dtype)), name
    assert (len(lane.buffers), lane.most, lane.under_way) == (BUFFERS, BUFFERS, 0)
    assert not threads()


def test_joined_tensors_arrive_in_their_order_and_progress_counts_what_was_read(weights, tensors):
    with closing(weights(torch.float32, LateLane())) as gpu:
        joined = gpu.joined(("t5", "t1", "t4"), (2, 40, 2), 3)
        gpu.settle()
        assert torch.equal(joined, torch.cat([tensors["t5"], tensors["t1"], tensors["t4"]]))
        last: LoadProgress = gpu.checkpoint._progress.call_args.args[0]
        assert last.bytes_done == joined.nbytes


def test_an_error_of_the_device_reaches_the_caller_and_the_thread_ends(weights, tensors):
    with closing(weights(torch.float32, LateLane(fails=3))) as gpu:
        gpu.tensor("t1", 40, 3)
        with pytest.raises(torch.AcceleratorError, match="illegal"):
            gpu.settle()
        with pytest.raises(torch.AcceleratorError, match="illegal"):
            gpu.tensor("t2", 7, 3)
    assert not threads()


def test_an_error_of_the_reader_reaches_the_caller(weights):
    def unreadable():
        yield torch.empty(1), torch.ones(1)
        raise OSError("the file has shrunk")

    with closing(Uploads(LateLane(), BYTES)) as uploads:
        uploads.copy(unreadable(), Mock(side_effect=AssertionError("was not read")))
        with pytest.raises(OSError, match="shrunk"):
            uploads.settle()
    assert not threads()


def test_the_caller_reads_ahead_but_not_far():
    """While the device is busy with one tensor, two more may wait."""
    gate, lane, ahead = threading.Event(), LateLane(), threading.Semaphore(0)
    place, source = torch.empty(1), torch.ones(1)

    def held():
        assert gate.wait(scaled(20))
        yield place, source

    with closing(Uploads(lane, BYTES)) as uploads:

        def read():
            for _ in range(4):
                uploads.copy(held(), lambda: None)
                ahead.release()

        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(3):
            assert ahead.acquire(timeout=scaled(20))
        assert not ahead.acquire(timeout=0.05)
        gate.set()
        reader.join(scaled(20))
        uploads.settle()
    assert (place.item(), lane.sent) == (1.0, 4)
