"""The process of a rank above 0, which loads its part of the model and computes the batches that rank 0 sends.

    python -m baton.engine.tp.rank_process PLAN RANK

Rank 0 starts the others and checks them between steps. The worker fails if one ends. No rank outlives rank 0, not even
a frozen one, because the kernel kills them with it. On GPUs, the environment of a rank names only its own GPU.

Before each forward, rank 0 sends the bucket of the graph, or 0, and the batch as int64, not pickled:

    lengths, on the host            N, B, W, L, fixed, sensitive, query_lens, context_lens, then nothing, or
                                    fixed, on_grid, whether there are starts, slots, counts, starts of states
    body, on the batch's device     token_ids, positions, slot_mapping, logit_rows, query_starts, kv_lens, block_tables
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.batch import Batch, StateRows
from baton.engine.kernels.base import Kernels
from baton.engine.models.checkpoint import Checkpoint, Progress
from baton.engine.models.config import ModelConfig, read_config
from baton.engine.models.llama import Parts
from baton.engine.models.loading import TransformerBackend, load_model
from baton.engine.tp.group import CACHE, END, GRAPHS, STATES, Ranks, TpLayout
from baton.engine.tp.kv_memory import GpuOf, kv_memory
from baton.engine.tp.rank_model import RankModel, empty
from baton.engine.tp.sharding import Heads, ShardedParts, ShardedWeights, divided
from baton.errors import BatonError, RankLost
from baton.logs import configure_logging


def lengths(batch: Batch) -> list[int]:
    """Return the sizes and lengths of a batch for the host, and of its states."""
    rows, width = batch.block_tables.shape
    counts = [len(batch.token_ids), rows, width, len(batch.logit_rows), batch.fixed, batch.sensitive]
    found, states = [*map(int, counts), *batch.query_lens, *batch.context_lens], batch.states
    if states is not None:
        found += map(int, (states.fixed, states.on_grid, states.starts is not None))
        found += [*states.slots, *states.counts, *(states.starts or ())]
    return found


def body(batch: Batch) -> Tensor:
    """Return the tensors of a batch, concatenated as int64."""
    wide = (batch.token_ids, batch.positions, batch.slot_mapping, batch.logit_rows)
    return torch.cat((*wide, batch.query_starts.long(), batch.kv_lens.long(), batch.block_tables.long().flatten()))


def unpack(numbers: list[int], tensors: Tensor) -> Batch:
    """Return the batch of `lengths` and `body`, with views of the body."""
    tokens, rows, width, wanted, fixed, sensitive = numbers[:6]
    sizes = [tokens, tokens, tokens, wanted, rows + 1, rows, rows * width]
    ids, positions, slots, logit_rows, starts, lens, tables = torch.split(tensors, sizes)
    return Batch(
        token_ids=ids,
        positions=positions,
        slot_mapping=slots,
        query_lens=numbers[6 : 6 + rows],
        context_lens=numbers[6 + rows : 6 + 2 * rows],
        query_starts=starts.int(),
        kv_lens=lens.int(),
        block_tables=tables.int().view(rows, width),
        logit_rows=logit_rows,
        fixed=bool(fixed),
        sensitive=bool(sensitive),
        states=_states(numbers[6 + 2 * rows :]),
    )


def _states(numbers: list[int]) -> StateRows | None:
    """Return the rows of states without their memory, which each rank has."""
    if not numbers:
        return None
    (fixed, on_grid, started), rest = numbers[:3], numbers[3:]
    each = len(rest) // (2 + started)
    slots, counts, starts = rest[:each], rest[each : 2 * each], rest[2 * each :]
    flags = {"fixed": bool(fixed), "on_grid": bool(on_grid)}
    return StateRows(torch.empty(0), slots, counts, torch.tensor(slots), starts if started else None, **flags)


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Implementation of `baton.engine.models.loading.Split` for one rank."""

    plan: TpLayout
    ranks: Ranks

    @property
    def names_the_model(self) -> bool:
        return self.ranks.rank == 0

    def config(self, whole: ModelConfig) -> ModelConfig:
        return divided(whole, self.plan.size, self.plan.key, self.plan.quantize)

    def parts(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, kernels: Kernels) -> Parts:
        heads = Heads(read_config(checkpoint.folder).kv_heads, self.plan.size)
        weights = ShardedWeights(checkpoint, dtype, device, self.ranks.rank, heads)
        return ShardedParts(weights, kernels, self.ranks.exchange)


def load_rank(plan: TpLayout, ranks: Ranks, progress: Progress | None = None) -> TransformerBackend:
    """Load the part of this rank, with layout and fingerprint of the whole model. Raises like `load_model`."""
    return load_model(
        plan.folder,
        dtype=plan.dtype,
        device=ranks.device,
        block_size=plan.block_size,
        max_model_len=plan.max_model_len,
        progress=progress,
        split=Split(plan, ranks),
        attention_splits=plan.splits,
        quantize=plan.quantize,
        kv_dtype=plan.kv_dtype,
    )


PROGRAM = "baton.engine.tp.rank_process"
VISIBLE = "CUDA_VISIBLE_DEVICES"
PR_SET_PDEATHSIG = 1
POLL_S = 0.01
GRACE_S = 0.5  # a broken connection is noticed before the exit code of the process that broke it


class Followers:
    """The processes of ranks 1 and up. They are killed when the thread that started them ends."""

    def __init__(self, plan: TpLayout) -> None:
        self._folder = Path(plan.store).parent
        command = [sys.executable, "-m", PROGRAM, json.dumps(asdict(plan))]
        self._cause: RankLost | None = None
        shared = [plan.memory] if plan.memory >= 0 else []
        ranks = range(1, plan.size)
        self.processes = [_start([*command, str(rank)], shared, environment(plan, rank, os.environ)) for rank in ranks]

    def check(self) -> None:
        """Raise RankLost with the cause if a process has ended, or with that of `explain`."""
        if self._cause is not None:
            raise self._cause
        polled = [(process.poll(), rank, process.pid) for rank, process in enumerate(self.processes, 1)]
        ended = [(code, rank, pid) for code, rank, pid in polled if code is not None]
        if ended:
            code, rank, pid = min(ended)  # ends by a signal (below 0) first, because the others follow from them
            if code < 0:
                end = f"was ended by {signal.Signals(-code).name}"
            else:
                end = f"ended with exit code {code}; see the log"
            raise RankLost(f"rank {rank} of this worker (process {pid}) {end}")

    def wait(self, stage: str, timeout_s: float) -> None:
        """Wait until all have reached a stage. Raises RankLost if one ends instead or takes longer."""
        deadline = time.monotonic() + timeout_s
        for rank in range(1, len(self.processes) + 1):
            while not _mark(self._folder, stage, rank).exists():
                self.check()
                if time.monotonic() > deadline:
                    raise RankLost(f"rank {rank} of this worker is not {stage} after {timeout_s:g} s")
                time.sleep(POLL_S)

    def explain(self, error: Exception) -> RankLost:
        """Return the cause of a failure: the process that ended, or else `error`."""
        self._cause = self._explained(error)
        return self._cause

    def _explained(self, error: Exception) -> RankLost:
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            try:
                self.check()
            except RankLost as ended:
                return ended
            time.sleep(POLL_S)
        return error if isinstance(error, RankLost) else RankLost(f"rank 0 failed: {type(error).__name__}: {error}")

    def close(self, timeout_s: float) -> None:
        """Wait until all have ended, and kill those still running after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def environment(plan: TpLayout, rank: int, own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank above 0 from that of rank 0. On GPUs, the rank sees only its own."""
    device = plan.device_of(rank, 0)
    if device.type == "cpu":
        return dict(own)
    entries = own.get(VISIBLE)  # names of any kind: indices, UUIDs
    return {**own, VISIBLE: str(device.index) if entries is None else entries.split(",")[device.index].strip()}


def _start(command: list[str], shared: list[int], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a rank with all output on stderr, and in its own process group, so that Ctrl-C reaches only rank 0."""
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=shared, env=env, process_group=0)


def _mark(folder: Path, stage: str, rank: int) -> Path:
    return folder / f"{stage}-{rank}"


def follow(plan: TpLayout, rank: int, gpu_of: GpuOf | None = None) -> None:
    """Process messages of rank 0 until END. Raises RankLost if the group breaks. `gpu_of` is for tests."""
    folder, device = Path(plan.store).parent, plan.device_of(rank, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels are launched on the current device
    _mark(folder, "started", rank).touch()
    ranks = Ranks(plan, rank, alive=lambda: None)
    local = load_rank(plan, ranks)
    memory = kv_memory(plan, ranks, local.layout, gpu_of)
    model = RankModel(local, ranks, memory)
    _mark(folder, "loaded", rank).touch()
    while (message := ranks.receive()).kind != END:
        if message.kind == CACHE:
            model.make_cache(message.numbers[0])
        elif message.kind == STATES:
            model.map_states(*message.numbers)
        elif message.kind == GRAPHS:
            rows, blocks = message.numbers
            widest = empty(rows, blocks, plan.block_size, device)
            with suppress(RuntimeError):  # rank 0 has it too, and logs it
                model.capture(widest)
        else:
            bucket, *numbers = message.numbers
            model.forward(unpack(numbers, message.body), bucket)
    model.drop_cache()
    memory.close()


def main() -> int:
    """Run the process of a rank, and return its exit code."""
    plan, rank = TpLayout(**json.loads(sys.argv[1])), int(sys.argv[2])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != plan.parent:
        return 1  # rank 0 ended before prctl took effect
    torch.set_num_threads(plan.threads)
    configure_logging(process=f"rank-{rank}")
    try:
        follow(plan, rank)
    except BatonError as error:
        sys.stderr.write(f"baton: rank {rank}: {type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # there is nothing to save, and a normal exit of torch is slow
