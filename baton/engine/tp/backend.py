"""The backend of a model that several processes compute, for the engine on rank 0."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.batch import Batch
from baton.engine.kernels.base import Splits
from baton.engine.kernels.kv_levels import KVDtype
from baton.engine.kernels.quantized import Quantize
from baton.engine.kernels.select import block_copy
from baton.engine.kv_cache import KVCache, StateMemory
from baton.engine.models.checkpoint import Progress
from baton.engine.models.config import read_config
from baton.engine.models.thinking import Thinker
from baton.engine.tp.group import (
    CACHE,
    END,
    GRAPHS,
    STATES,
    STEP,
    Ranks,
    SharedExchange,
    TpLayout,
    memory_is_ordered,
)
from baton.engine.tp.kv_memory import KVMemory, kv_memory
from baton.engine.tp.rank_model import RankModel
from baton.engine.tp.rank_process import VISIBLE, Followers, body, lengths, load_rank
from baton.engine.tp.sharding import divided
from baton.engine.tp.states import RankedStates, state_file
from baton.engine.tp.watchdog import Watchdog, mark_on
from baton.errors import ConfigError, RankLost

PART_ELEMENTS, GPU_PART_ELEMENTS = 2**20, 2**22
HEAD_ROWS = 64  # rows of logits that fit in one exchange
TIMEOUT_S = 30.0
START_S = 600.0
END_S = 2.0


class ShardedBackend:
    """A `ModelBackend` with rank 0 in this process, from `load_sharded`. All errors of a forward or a new cache become
    RankLost, because ranks out of step cannot continue. On GPUs, a `watchdog` ends the process if they hang.
    """

    def __init__(
        self,
        plan: TpLayout,
        model: RankModel,
        ranks: Ranks,
        followers: Followers,
        memory: KVMemory,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.local = local = model.local
        self.name, self.vocab_size, self.max_model_len = local.name, local.vocab_size, local.max_model_len
        self.device, self.fingerprint, self.layout = local.device, local.fingerprint, local.layout
        self._plan, self._model, self._ranks, self._followers, self._memory = plan, model, ranks, followers, memory
        self._guard = nullcontext if watchdog is None else watchdog.guard
        self.thinker: Thinker | None = None
        self.nondeterminism = ""
        self._kv: KVCache | None = None
        self._states: Tensor | None = None
        self._closed = False

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._followers.processes]

    def facts(self, rows: Sequence[int]) -> tuple[str, ...]:
        """Return the number of ranks and threads, and the facts of a rank, which are the same on all ranks."""
        return (f"{self._plan.size} ranks of {self._plan.threads} threads", *self.local.facts(rows))

    def steady_rows(self) -> int:
        return 0  # exchanges are cut by their size

    def make_cache(self, total_blocks: int, *, exposed: bool = False) -> KVCache:
        """Make the cache for `forward` on all ranks, and invalidate the previous one. Raises RankLost, or ConfigError
        if memory is lacking, or it cannot be `exposed` here.
        """
        self._check_open()
        self._drop_cache()
        self._memory.prepare(exposed=exposed)
        try:
            self._ranks.send(CACHE, [total_blocks])
            self._kv = self._model.make_cache(total_blocks)
        except ConfigError as error:  # not enough memory, for example
            self._lost(error)
            raise
        except Exception as error:
            raise self._lost(error) from error
        self._kv.state_maker = self._make_states
        return self._kv

    def _drop_cache(self) -> None:
        if self._kv is not None:
            self._kv.state_maker = None  # no cycle of references keeps the memory
        self._kv = self._states = None
        self._model.drop_cache()

    def _make_states(self, slots: int) -> StateMemory:
        """Raises RankLost, or ConfigError, after which the ranks can continue, if memory is lacking."""
        self._check_open()
        spec, size = self.local.model.config.spec, self._plan.size
        file = state_file(slots, size, spec.state_size, self._plan.key.replace("tensor_parallel", "kv_memory"))
        numbers = [slots, os.getpid(), file]
        try:
            self._ranks.send(STATES, numbers)
            self._states = self._model.map_states(*numbers)
        except Exception as error:
            raise self._lost(error) from error
        finally:
            os.close(file)
        return RankedStates(self._states, [each for each in spec.recurrent if each is not None])

    def capture(self, widest: Batch) -> list[int]:
        """Capture the decode steps of all ranks over the cache, and return the buckets. `widest` is the memory of later
        steps (`Inputs.widest`). Raises RuntimeError if that is impossible, and RankLost.
        """
        self._check_open()
        try:
            with self._guard():
                self._ranks.send(GRAPHS, list(widest.block_tables.shape))
                return self._model.capture(widest)
        except RuntimeError:
            raise  # on all ranks, which can continue
        except Exception as error:
            raise self._lost(error) from error

    def forward(self, batch: Batch, kv: KVCache) -> torch.Tensor:
        """Run a forward on all ranks. On return, K and V of all ranks are written, or issued to GPUs: each rank writes
        those of a layer before its part of the sums.
        """
        self._check_open()
        if self._kv is None or kv is not self._kv:
            raise ValueError("kv is not the cache that make_cache returned last")
        if batch.states is not None and batch.states.memory is not self._states:
            raise ValueError("the states are not those that make_states returned last")
        try:
            with self._guard():
                bucket = self._model.bucket(batch)
                self._ranks.send(STEP, [bucket, *lengths(batch)], body(batch))
                return self._model.forward(batch, bucket)
        except Exception as error:  # any error, because the other ranks are in the middle of this forward
            raise self._lost(error) from error

    def check(self) -> None:
        if not self._closed:
            self._followers.check()
            self.local.check()

    def close(self) -> None:
        """End the other ranks. On return all have ended, and their KV on GPUs is unmapped."""
        if self._closed:
            return
        try:
            self._drop_cache()
            self._memory.close()
            with suppress(RankLost):
                self._ranks.send(END, [])
        finally:
            self._end(END_S)

    def _check_open(self) -> None:
        if self._closed:
            raise RankLost("the ranks of this worker have ended")

    def _lost(self, error: Exception) -> RankLost:
        """End the other ranks after a failure, and return its cause. Their memory stays mapped until this process ends,
        because a GPU that waits for the lost rank blocks unmapping.
        """
        lost = self._followers.explain(error)
        self._end(0.0)
        return lost

    def _end(self, timeout_s: float) -> None:
        self._closed = True
        self._followers.close(timeout_s)
        _close_memory(self._plan)


@dataclass(frozen=True, slots=True)
class Ranking:
    """Division of a model over ranks. On GPUs, they use consecutive ones, from that of rank 0 on."""

    size: int
    threads: int | None = None  # of each rank; None means torch's default divided by the ranks
    key: str = "tensor_parallel"  # name of `size` in the cluster file
    shared_memory: bool | None = None  # instead of gloo, on a CPU; None means if the machine supports it
    timeout_s: float = TIMEOUT_S  # a rank is lost after this time of silence


def load_sharded(  # noqa: PLR0913  (all but two have a default)
    path: Path | str,
    ranking: Ranking,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    block_size: int = 16,
    max_model_len: int | None = None,
    progress: Progress | None = None,
    attention_splits: Splits = "auto",
    quantize: Quantize = "none",
    kv_dtype: KVDtype = "auto",
) -> ShardedBackend:
    """Load a checkpoint onto ranks: this process and `size - 1` new ones, which are killed with the calling thread.
    Raises like `load_model`; ConfigError with `key` if the model cannot be divided; RankLost if a rank does not start.
    """
    size, config = ranking.size, read_config(Path(path))
    divided(config, size, ranking.key, quantize)
    check_gpus(torch.device(device), size, ranking.key)
    cpu = torch.device(device).type == "cpu"
    threads = ranking.threads or max(1, torch.get_num_threads() // size)
    torch.set_num_threads(threads)
    part = PART_ELEMENTS if cpu else GPU_PART_ELEMENTS
    capacity = max(part, config.hidden_size, HEAD_ROWS * -(-config.vocab_size // size))
    shared = memory_is_ordered() if ranking.shared_memory is None else ranking.shared_memory
    with tempfile.TemporaryDirectory(prefix="baton-ranks-") as folder:
        plan = TpLayout(
            folder=str(path),
            key=ranking.key,
            size=size,
            dtype=dtype,
            device=str(device),
            block_size=block_size,
            max_model_len=max_model_len,
            threads=threads,
            store=str(Path(folder) / "store"),
            parent=os.getpid(),
            capacity=capacity,
            timeout_s=ranking.timeout_s,
            memory=_memory(SharedExchange.nbytes(size, capacity)) if cpu and shared else -1,
            splits=attention_splits,
            quantize=quantize,
            kv_dtype=kv_dtype,
        )
        return _start(plan, progress)


def check_gpus(device: torch.device, size: int, key: str) -> None:
    """Raise ConfigError with `key` if this process does not see a GPU for each of `size` ranks."""
    seen = torch.cuda.device_count() - (device.index or 0)
    if device.type == "cuda" and seen < size:
        listed = f"{VISIBLE}={os.environ[VISIBLE]}" if VISIBLE in os.environ else f"{VISIBLE} is not set"
        text = f"each rank needs a GPU of its own, and this worker sees {seen} from {device} on ({listed})"
        raise ConfigError(f"{key}: {size} on {device}: {text}; set at most {max(seen, 1)}")


def _start(plan: TpLayout, progress: Progress | None) -> ShardedBackend:
    followers = Followers(plan)
    try:
        followers.wait("started", START_S)
        device = plan.device_of(0, 0)
        cpu = device.type == "cpu"
        watchdog = None if cpu else Watchdog(followers.check, mark_on(device), plan.timeout_s)
        with nullcontext() if watchdog is None else watchdog.guard():  # NCCL connects
            ranks = Ranks(plan, 0, followers.check)
        local = load_rank(plan, ranks, progress)
        memory = kv_memory(plan, ranks, local.layout, copy=block_copy(local.model.kernels))
        followers.wait("loaded", START_S)
    except BaseException:
        followers.close(0.0)
        _close_memory(plan)
        raise
    return ShardedBackend(plan, RankModel(local, ranks, memory), ranks, followers, memory, watchdog)


def _memory(nbytes: int) -> int:
    """Return a descriptor of anonymous memory, freed with the last process that holds it."""
    descriptor = os.memfd_create("baton-ranks")
    os.ftruncate(descriptor, nbytes)
    return descriptor


def _close_memory(plan: TpLayout) -> None:
    if plan.memory >= 0:
        os.close(plan.memory)
