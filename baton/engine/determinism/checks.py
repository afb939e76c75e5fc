"""Measurements of a loaded model's fixed forwards: startup checks, the fingerprint of their bits, times of passes.

The checks compute the same tokens in every way that the engine may meet them, and compare all bits of KV and logits.
Nothing is assumed about a kernel, so one that varies is found. `baton profile` measures the times. They set the size of
verify passes if the cluster file leaves it open: a small pass reads all weights for few tokens, a large one waits for
sequences to fill it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import structlog
import torch
from torch import Tensor

from baton.clock import SystemClock
from baton.core import KVLayout
from baton.engine.batch import Batch, StateRows
from baton.engine.determinism.shapes import SHORT, SHORT_UNTIL, FixedShapes
from baton.engine.kernels.base import ANY_ROWS
from baton.engine.kernels.cpu.compiler import machine
from baton.engine.kernels.cpu.kernel_choice import name_others
from baton.engine.kernels.cpu.tuning import alternate
from baton.engine.kernels.elementwise import GRAIN
from baton.engine.kernels.gpu.driver import driver_version
from baton.engine.kv_cache import KVCache
from baton.engine.model_backend import ModelBackend
from baton.engine.sampling.noise import mix64
from baton.hashing import fingerprint

WINDOW = FixedShapes().tokens  # of the passes whose times are measured
TOTALS = (32, 64, 128, 256, 512)  # tokens of a pass: rows times WINDOW
CLOSE = 1.15  # factor of the best time per token that is still good
CONTEXT = 256  # tokens before a row's window
STATES = 4  # positions of the decode steps that are compared, in models with recurrent layers
log = structlog.get_logger(__name__)


def bits_fingerprint(backend: ModelBackend, shapes: FixedShapes) -> str:
    """Return 24 hex digits. If they are equal on two workers, fixed forwards of `shapes` give equal bits."""
    grid = SHORT, SHORT_UNTIL
    rows = sorted({1, *grid, shapes.rows * shapes.tokens})  # 1, because only the last row of a prompt needs logits
    return fingerprint(
        (
            backend.fingerprint,
            backend.layout.dtype,
            *backend.facts(rows),
            f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.get_float32_matmul_precision()}",
            *device_facts(backend.device, backend.layout),
            f"{shapes.rows} x {shapes.tokens} on {grid}, functions of {GRAIN}",
        )
    )


def device_facts(device: torch.device, layout: KVLayout) -> tuple[str, ...]:
    """Return facts of the device: processor and instructions, or GPU, driver, CUDA and the kernels' block size."""
    if device.type == "cpu":
        here = machine()
        return (here.model, *sorted(here.flags), torch.backends.cpu.get_cpu_capability())
    found = torch.cuda.get_device_properties(device)
    capability = f"{found.major}.{found.minor}"
    # Kernels find positions through block tables; only a size that is no multiple of 16 compiles to other code.
    blocks = f"blocks of {math.gcd(layout.block_size, 16)}"
    return (found.name, capability, f"driver {driver_version()}", f"CUDA {torch.version.cuda}", blocks)


class FixedRow(NamedTuple):
    """Tokens of one sequence from position `start` on, and the blocks with its KV."""

    tokens: list[int]
    start: int
    blocks: list[int]


def checked_shapes(backend: ModelBackend, shapes: FixedShapes) -> FixedShapes | None:
    """Return `shapes` with the `exact_rows` that hold here, or set `nondeterminism` and return None if bits vary. Makes
    caches, so the backend's previous one must not be used again.
    """
    clock = SystemClock()
    began = clock.monotonic()
    backend.nondeterminism = backend.nondeterminism or check_fixed(backend, shapes)
    found = None if backend.nondeterminism else _with_exact_steps(backend, shapes)
    varies = "" if found is None else _Checker(backend, found).lengths()
    seconds = round(clock.monotonic() - began, 3)
    if found is None:
        log.warning("fixed_forwards_vary", reason=backend.nondeterminism, seconds=seconds)
    else:
        # On a GPU, a window of one token runs in the kernel of single tokens, which splits long contexts.
        ragged = not varies and backend.thinker is None and backend.device.type == "cpu"
        found = replace(found, ragged=ragged)
        sizes = {"rows": found.rows, "tokens": found.tokens, "exact_rows": found.exact_rows}
        kinds = {"everywhere": found.everywhere, "ragged": found.ragged}
        log.info("fixed_forwards_checked", **sizes, **kinds, varies=varies, seconds=seconds)
    return found


def check_fixed(backend: ModelBackend, shapes: FixedShapes) -> str:
    """Return a description of the bits that vary, or ""."""
    checker = _Checker(backend, shapes)
    return checker.chunks() or checker.passes()


def exact_rows(backend: ModelBackend, shapes: FixedShapes) -> int:
    """Return up to how many rows, at most `shapes.exact_rows`, a decode step gives the bits of a verify pass, or 0."""
    steady = backend.steady_rows()
    most = min(shapes.exact_rows, steady, 2 * shapes.tokens)
    if most < 1 or steady < shapes.rows * shapes.tokens:
        return 0
    found = _Checker(backend, shapes).steps(most)
    if found:
        log.warning("decode_steps_vary", reason=found)
    return 0 if found else most


def _with_exact_steps(backend: ModelBackend, shapes: FixedShapes) -> FixedShapes:
    found = replace(shapes, exact_rows=exact_rows(backend, shapes))
    if not found.exact_rows or backend.steady_rows() < ANY_ROWS or backend.layout.state_size:
        return found  # a state is computed in floating point, in whole chunks of the grid
    if varies := _Checker(backend, shapes).mixtures():
        log.warning("decode_steps_vary", reason=varies)
    return replace(found, everywhere=not varies)


class _Checker:
    def __init__(self, backend: ModelBackend, shapes: FixedShapes) -> None:
        self._backend, self._shapes = backend, shapes
        self._from = max(1, min(SHORT, backend.max_model_len - 2 * shapes.tokens))  # where verify passes begin
        each = backend.layout.blocks_for(max(2 * SHORT_UNTIL, SHORT + 2 * shapes.tokens))
        tables = [list(range(row * each, (row + 1) * each)) for row in range(shapes.rows + 1)]
        self._blocks, *self._others = [table[::-1] for table in tables]
        self._kv = backend.make_cache(len(tables) * each)
        self._states: dict[int, Tensor] = {}  # of recurrent layers behind the checked tokens, by position
        states = self._kv.make_states(STATES + 1) if backend.layout.state_size else None
        self._memory = torch.empty(0) if states is None else states.rows  # states behind the last forward

    def chunks(self) -> str:
        """Compare prompts that end in a chunk: the same tokens in other blocks, with other tokens behind them."""
        for start in (SHORT_UNTIL, 0):  # in this order, only zeros precede both
            if start >= self._backend.max_model_len:
                continue  # no prompt is that long
            span = self._shapes.chunk(start)
            real = len(span) * 5 // 8
            found = []
            for behind, blocks in enumerate((self._blocks, self._others[0])):
                tokens = self._tokens(0, start, real) + self._tokens(1 + behind, start + real, len(span) - real)
                counts = [len(span) if behind else real]  # a state may also depend on where the prompt ends
                logits = self._forward([FixedRow(tokens, start, blocks)], [real - 1], counts, on_grid=True)
                found.append((logits, self._kv_of(blocks, start, real)))
            if not all(map(torch.equal, *found)):
                return f"the bits of a chunk of {len(span)} tokens depend on the padding behind it"
        return ""

    def passes(self) -> str:
        """Compare the same tokens in verify passes that begin elsewhere."""
        width, first = self._shapes.tokens, self._from
        logits, cache = self._reference()
        last = self._shapes.rows - 1
        for slot, offset in ((last, 0), (last // 2, 1), (last, width // 2), (0, width - 1)):
            found = self._verify(slot, first + offset, 7 * offset + slot)
            same_kv = torch.equal(self._kv_of(self._blocks, first + offset, width), cache[:, offset : offset + width])
            if not same_kv or not torch.equal(found, logits[offset : offset + width]):
                where = f"{offset} tokens later, in row {slot} of {last + 1}"
                return f"tokens have other {'logits' if same_kv else 'KV'} in a verify pass that begins {where}"
        return ""

    def lengths(self) -> str:
        """Compare those tokens in verify passes of the same total whose windows have other lengths."""
        width, first, total = self._shapes.tokens, self._from, self._shapes.total
        logits, cache = self._reference()
        for offset, count in ((0, 1), (1, width - 1), (width // 2, width // 2 + 1), (0, min(2 * width, total))):
            pieces = [min(width, total - count - at) for at in range(0, total - count, width)]
            rows = [
                FixedRow(self._tokens(offset + row, 0, size), (count * 13 + row) % self._from, blocks)
                for row, (size, blocks) in enumerate(zip(pieces, self._others, strict=False), 3)
            ]
            before = sum(pieces[: len(rows) // 2])
            rows.insert(len(rows) // 2, FixedRow(self._tokens(0, first + offset, count), first + offset, self._blocks))
            found = self._forward(rows, list(range(total)))[before : before + count]
            same = torch.equal(found, logits[offset : offset + count])
            if not same or not torch.equal(self._kv_of(self._blocks, first, 2 * width), cache):
                return f"tokens have other {'KV' if same else 'logits'} in a window of {count} tokens"
        return ""

    def steps(self, most: int) -> str:
        """Compare those tokens in decode steps of one to `most` rows, each token in its own row."""
        width, first = self._shapes.tokens, self._from
        logits, cache = self._reference()
        for count in sorted({*range(1, min(8, most) + 1), *range(8, most, 8), most}):
            offsets = [offset for _, offset in sorted((mix64(count << 32 | i), i) for i in range(2 * width))][:count]
            if self._backend.layout.state_size:  # few states, because each costs a pass and memory
                offsets = [offset % STATES for offset in offsets]
            rows = [FixedRow(self._tokens(0, first + offset, 1), first + offset, self._blocks) for offset in offsets]
            same = torch.equal(self._forward(rows, list(range(count))), logits[offsets])
            if not same or not torch.equal(self._kv_of(self._blocks, first, 2 * width), cache):
                return f"tokens have other {'KV' if same else 'logits'} in a decode step of {count} rows"
        return ""

    def mixtures(self) -> str:
        """Compare those tokens in forwards with chunks of other sequences, cut in two at any place."""
        width, first = 2 * self._shapes.tokens, self._from
        logits, cache = self._reference()
        for cut in (1, width // 3, width - 1):
            found = []
            for start, count in ((0, cut), (cut, width - cut)):
                mine = FixedRow(self._tokens(0, first + start, count), first + start, self._blocks)
                others = [
                    FixedRow(self._tokens(cut + row, 0, width // 2), cut, blocks)
                    for row, blocks in enumerate(self._others, 3)
                ]
                before = sum(len(other.tokens) for other in others)
                found.append(self._forward([*others, mine], list(range(before, before + count))))
            same = torch.equal(torch.cat(found), logits)
            if not same or not torch.equal(self._kv_of(self._blocks, first, width), cache):
                return f"tokens have other {'KV' if same else 'logits'} in chunks of {cut} and then {width - cut}"
        return ""

    def _reference(self) -> tuple[Tensor, Tensor]:
        """Return logits and KV of the checked tokens from two verify passes, one after the other."""
        width, first = self._shapes.tokens, self._from
        self._forward([FixedRow(self._tokens(0, 0, SHORT), 0, self._blocks)], [], on_grid=True)
        logits = torch.cat([self._verify(0, start, start) for start in (first, first + width)])
        return logits, self._kv_of(self._blocks, first, 2 * width)

    def _verify(self, slot: int, start: int, salt: int, count: int | None = None) -> Tensor:
        """Return logits as int32 [W, vocab] of the checked sequence in one slot. `salt` varies the other rows. Its
        state changes by `count` tokens, or all.
        """
        width = self._shapes.tokens
        rows = [
            FixedRow(self._tokens(salt + row, 0, width), (salt * 13 + row) % self._from, blocks)
            for row, blocks in enumerate(self._others[: self._shapes.rows], 3)
        ]
        rows[slot] = FixedRow(self._tokens(0, start, width), start, self._blocks)
        counts = [width] * len(rows)
        counts[slot] = width if count is None else count
        logits = self._forward(rows, list(range(len(rows) * width)), counts)
        return logits[slot * width : (slot + 1) * width]

    def _tokens(self, sequence: int, start: int, count: int) -> list[int]:
        return [mix64(sequence << 32 | position) % self._backend.vocab_size for position in range(start, start + count)]

    def _forward(
        self, rows: list[FixedRow], wanted: list[int], counts: list[int] | None = None, *, on_grid: bool = False
    ) -> Tensor:
        """Return the bits of the wanted rows' logits: int32 [L, vocab]. States change by `counts` tokens of each row.
        The checked sequence has one state at each of its positions. Others share one, which begins with zeros. So the
        memory for states does not grow with the rows.
        """
        batch = fixed_batch(rows, wanted, self._backend.layout.block_size, self._backend.device)
        batch = replace(batch, sensitive=True)
        if self._backend.layout.state_size:
            mine = sorted({row.start for row in rows if row.blocks is self._blocks})
            before = [self._state(start) if start > self._from and not on_grid else None for start in mine]
            memory = self._memory.zero_()
            for old, state in zip(before, memory, strict=False):
                if old is not None:
                    state.copy_(old)
            slots = [mine.index(row.start) if row.blocks is self._blocks else len(mine) for row in rows]
            states = StateRows(memory, slots, counts or batch.query_lens, torch.tensor(slots))
            starts = batch.query_starts[:-1].tolist() if max(batch.query_lens) > 1 else None
            batch = replace(batch, states=replace(states, starts=starts, fixed=True, on_grid=on_grid))
        return self._backend.forward(batch, self._kv).view(torch.int32).clone()

    def _state(self, position: int) -> Tensor:
        """Return the state behind the checked tokens from the first pass on, up to `position`, at most W later."""
        if position not in self._states:
            before = [tensor.clone() for tensor in self._kv.tensors]  # rows behind `position` get other KV
            self._verify(0, self._from, 0, position - self._from)
            self._states[position] = self._memory[0].clone()
            for tensor, old in zip(self._kv.tensors, before, strict=True):
                tensor.copy_(old)
        return self._states[position]

    def _kv_of(self, blocks: list[int], start: int, count: int) -> Tensor:
        """Return the bytes of positions: uint8 [layers * tensors, count, bytes]."""
        layout = self._backend.layout
        out = torch.empty(layout.layers * count * layout.layer_token_bytes, dtype=torch.uint8, device=self._kv.device)
        self._kv.gather(range(layout.layers), blocks, start, start + count, out)
        return out.view(layout.layers * len(layout.tensors), count, -1)


def fixed_batch(rows: list[FixedRow], wanted: list[int], block_size: int, device: torch.device) -> Batch:
    """Build the batch of a fixed forward of these rows."""
    spans = [range(row.start, row.start + len(row.tokens)) for row in rows]
    slots = [
        row.blocks[position // block_size] * block_size + position % block_size
        for row, span in zip(rows, spans, strict=True)
        for position in span
    ]
    lengths, contexts = [len(span) for span in spans], [span.stop for span in spans]
    with device:
        return Batch(
            token_ids=torch.tensor([token for row in rows for token in row.tokens]),
            positions=torch.tensor([position for span in spans for position in span]),
            slot_mapping=torch.tensor(slots),
            query_lens=lengths,
            context_lens=contexts,
            query_starts=torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32),
            kv_lens=torch.tensor(contexts, dtype=torch.int32),
            block_tables=torch.tensor([row.blocks for row in rows], dtype=torch.int32),
            logit_rows=torch.tensor(wanted, dtype=torch.int64),
            fixed=True,
        )


@dataclass(frozen=True, slots=True)
class VerifyShapeTimes:
    """Seconds of a verify pass by its tokens. Up to `steady` tokens, decode steps can be exact; 0 means never."""

    seconds: Mapping[int, float]
    steady: int = 0

    def best(self, *, exact: bool) -> int:
        """Return the best size. If `exact`, keep decode steps exact if possible, because each saves a whole pass."""
        steady = {total: seconds for total, seconds in self.seconds.items() if exact and total <= self.steady}
        each = {total: seconds / total for total, seconds in (steady or self.seconds).items()}
        return min(total for total, seconds in each.items() if seconds <= CLOSE * min(each.values()))


def measure_passes(backend: ModelBackend, max_rows: int) -> VerifyShapeTimes:
    """Measure passes of up to `max_rows` rows. Makes a cache: the backend's previous one must not be used again."""
    start = max(0, min(CONTEXT, backend.max_model_len - WINDOW))
    totals = [total for total in TOTALS if total // WINDOW <= max(1, max_rows)]
    each = backend.layout.blocks_for(start + WINDOW)
    rows = [FixedRow([0] * WINDOW, start, list(range(at, at + each))) for at in range(0, totals[-1] * each, each)]
    kv = backend.make_cache(totals[-1] // WINDOW * each)
    size, device = backend.layout.block_size, backend.device
    batches = [fixed_batch(rows[: total // WINDOW], list(range(total)), size, device) for total in totals]
    seconds = alternate([partial(_forward, backend, kv, batch) for batch in batches])
    return VerifyShapeTimes(dict(zip(totals, seconds, strict=True)), backend.steady_rows())


@torch.inference_mode()
def _forward(backend: ModelBackend, kv: KVCache, batch: Batch) -> None:
    backend.forward(batch, kv)
    if backend.device.type == "cuda":
        torch.cuda.synchronize(backend.device)


def load_passes(path: Path) -> VerifyShapeTimes | None:
    """Return stored measurements, or None if there are none or the file is damaged."""
    try:
        stored = json.loads(path.read_text())
        seconds = {int(total): float(taken) for total, taken in stored["seconds"].items()}
        whole = seconds and all(t >= WINDOW and t % WINDOW == 0 and 0 < s < math.inf for t, s in seconds.items())
        if not whole:
            raise ValueError("it has no valid times of verify passes")
        return VerifyShapeTimes(seconds, int(stored["steady"]))
    except FileNotFoundError:
        name_others(path)
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("profile_unreadable", path=str(path), error=str(error))
        return None


def save_passes(path: Path, passes: VerifyShapeTimes) -> None:
    """Write the measurements atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.part")  # another process may write it, too
    scratch.write_text(json.dumps(asdict(passes), indent=1))
    scratch.replace(path)
