"""The oracle: a test model with answers that follow from the tokens alone, and are wrong if any KV is wrong.

Each position has a 64-bit state: a running hash of the tokens up to it. Its KV bytes, in every layer, are that state
spread by invertible maps. A forward takes the state before a chunk from the KV of the previous position. It folds ALL
KV up to the wanted position into the logits: a sum over 64-bit words, each times its own odd number. One changed word
always changes the sum; swapped, torn or stale blocks do except for one chance in 2^64.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.core import KVLayout, SequenceSpec
from baton.engine.batch import Batch
from baton.engine.kernels.base import ANY_ROWS
from baton.engine.kernels.select import fused_draw
from baton.engine.kv_cache import KVCache, exposed_memory
from baton.engine.models.thinking import Thinker
from baton.engine.sampling.noise import GOLDEN64, mix64, mix64_tensor, signed64
from baton.engine.sampling.output import OutputFactory
from baton.engine.sampling.sampler import Sampler
from baton.errors import ConfigError, EngineFault
from baton.hashing import fingerprint, keyed_digest
from baton.tokenizer import OracleTokenizer

WORD_BYTES = 8
LOGIT_RANGE = 8.0
RARE = -6.0  # added to the logits of control characters and bytes beyond ASCII; EOS is as likely as a letter


def oracle_layout(block_size: int = 16, layers: int = 2, kv_heads: int = 2, head_dim: int = 4) -> KVLayout:
    """Return a small KV layout. Any other works if a position fills whole 8-byte words."""
    return KVLayout(layers, kv_heads, head_dim, block_size, "float32")


class _Scratch(threading.local):
    """Reused memory of one thread, because engines of several threads may share a model."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._words: Tensor | None = None

    def words(self, size: int) -> Tensor:
        """Return int64 words, valid until the next call. New memory would cost more than the computation."""
        if self._words is None or len(self._words) < size:
            with torch.inference_mode(False):  # else it is usable only in that mode
                self._words = torch.empty(size, dtype=torch.int64, device=self._device)
        return self._words[:size]


class OracleBackend:
    """A `ModelBackend` with bytes as tokens. Raises ConfigError if a position's K or V are not whole 8-byte words."""

    def __init__(
        self, layout: KVLayout | None = None, *, max_model_len: int = 2048, seed: int = 0, device: str = "cpu"
    ) -> None:
        self.layout = layout or oracle_layout()
        position_bytes = self.layout.row_bytes
        if position_bytes % WORD_BYTES:
            raise ConfigError(f"the oracle needs whole 8-byte words for K of a position, got {position_bytes} bytes")
        self.name = "oracle"
        self.nondeterminism = ""
        self.thinker: Thinker | None = None
        self.tokenizer = OracleTokenizer()
        self.vocab_size = self.tokenizer.vocab_size
        self.max_model_len, self.device = max_model_len, torch.device(device)
        self.fingerprint = fingerprint(("oracle", str(seed), self.layout.wire))
        self._words = position_bytes // WORD_BYTES
        self._start = int.from_bytes(keyed_digest(bytes(32), b"baton oracle", str(seed).encode())[:8], "little")
        self._salt, self._odd, self._weights = self._constants()
        likely = [32 <= column < 127 or column in self.tokenizer.eos_ids for column in range(self.vocab_size)]
        self._bias = torch.tensor([0.0 if common else RARE for common in likely], device=self.device)
        self._columns = torch.arange(1, self.vocab_size + 1, device=self.device) * signed64(GOLDEN64)
        self._seen: tuple[weakref.ref[KVCache], list[Tensor]] | None = None
        self._scratch = _Scratch(self.device)

    def facts(self, rows: Sequence[int]) -> tuple[str, ...]:
        return ()  # integers are never rounded

    def steady_rows(self) -> int:
        return ANY_ROWS - 1  # prompts stay on the grid, as with weights in floating point

    def make_cache(self, total_blocks: int, *, exposed: bool = False) -> KVCache:
        self._seen = None
        memory = exposed_memory(self.layout, total_blocks) if exposed else None
        return KVCache(self.layout, total_blocks, self.device, exposed=memory)

    def check(self) -> None:
        """Do nothing: one process computes everything."""

    def close(self) -> None:
        """Do nothing: no other process exists."""

    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        views = self._views(kv)
        states = self._run(batch, views[0])
        written = self._spread(states)
        for view, words in zip(views, written, strict=True):
            view.flatten(1, 2)[:, batch.slot_mapping] = words
        if batch.on_layer is not None:
            for layer in range(self.layout.layers):
                batch.on_layer(layer)
        rows = sequences = batch.logit_rows
        if max(batch.query_lens) > 1:
            lengths = torch.tensor(batch.query_lens, device=self.device)
            sequences = torch.arange(len(lengths), device=self.device).repeat_interleave(lengths)[rows]
        return self._logits(states[rows], self._fold(views, batch.block_tables[sequences], batch.positions[rows]))

    def expected(self, spec: SequenceSpec, n: int | None = None) -> list[int]:
        """Return the first `n` (None means all) output tokens after `spec.known`, from the tokens alone."""
        choice = OutputFactory(self.tokenizer, self.vocab_size, self.max_model_len).start(spec)
        sampler, state, folded, done, produced = Sampler(fused_draw(self.device)), self._start, 0, 0, list[int]()
        while choice.finish is None and (n is None or len(produced) < n):
            states = self._chain(state, choice.tokens[done:])
            weights = self._weights[:, :, done : done + len(states)]
            folded += int((self._spread(self._tensor(states)) * weights).sum())
            state, done = states[-1], len(choice.tokens)
            logits = self._logits(self._tensor([state]), self._tensor([folded]))
            token_id = sampler.sample(logits, [choice.row])[0].token_id
            if token_id is None:
                raise EngineFault("the oracle computed a logit that is not a finite number")
            if choice.push(token_id) is not None:
                produced.append(token_id)
        return produced

    def _run(self, batch: Batch, keys: Tensor) -> Tensor:
        """Return the states of all N new tokens, from the cached states before them."""
        before, tokens = self._before(batch, keys), batch.token_ids.cpu().numpy()
        if max(batch.query_lens) == 1:
            return mix64_tensor(torch.from_numpy((before ^ tokens) + signed64(GOLDEN64))).to(self.device)
        known, states = tokens.tolist(), list[int]()
        for state, count in zip(before.tolist(), batch.query_lens, strict=True):
            states += self._chain(state, known[len(states) : len(states) + count])
        return self._tensor(states)

    def _before(self, batch: Batch, keys: Tensor) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the state before each sequence's new tokens: the KV word with salt 0 and factor 1."""
        last = np.subtract(batch.context_lens, batch.query_lens) - 1
        number, offset = divmod(np.maximum(last, 0), self.layout.block_size)
        blocks = batch.block_tables.cpu().numpy()[np.arange(len(last)), number]
        found = keys[0, torch.from_numpy(blocks).to(self.device), torch.from_numpy(offset).to(self.device), 0]
        return np.where(last < 0, signed64(self._start), found.cpu().numpy())

    def _chain(self, state: int, tokens: Iterable[int]) -> list[int]:
        return [state := mix64((state ^ token) + GOLDEN64) for token in tokens]

    def _tensor(self, numbers: Iterable[int]) -> Tensor:
        return torch.tensor([signed64(x) for x in numbers], dtype=torch.int64, device=self.device)

    def _spread(self, states: Tensor) -> Tensor:
        """Return the KV words of positions with these states: int64 [tensors, layers, N, words]."""
        return (states[:, None] ^ self._salt) * self._odd

    def _fold(self, views: list[Tensor], tables: Tensor, positions: Tensor) -> Tensor:
        """Return the weighted sum of all KV words at positions 0..positions[i] through tables[i]: int64 [L]."""
        blocks = self.layout.blocks_for(int(positions.max()) + 1) if len(positions) else 0
        span, wanted = blocks * self.layout.block_size, tables[:, :blocks].flatten()
        folded = torch.zeros(len(positions), span * self._words, dtype=torch.int64, device=self.device)
        for view, weights in zip(views, self._weights, strict=True):
            into = self._scratch.words(len(view) * folded.numel())
            torch.index_select(view, 1, wanted, out=into.view(len(view), len(wanted), *view.shape[2:]))
            words = into.view(len(view), *folded.shape)
            folded += words.mul_(weights[:, :span].flatten(1)[:, None]).sum(dim=0)
        ends = (positions[:, None] + 1) * self._words
        return folded.mul_(torch.arange(folded.shape[1], device=self.device) < ends).sum(dim=1)

    def _logits(self, states: Tensor, folded: Tensor) -> Tensor:
        bits = mix64_tensor(mix64_tensor(states ^ mix64_tensor(folded))[:, None] + self._columns) & 0xFFFFFF
        return bits.float() * (LOGIT_RANGE / 2**24) + self._bias

    def _views(self, kv: KVCache) -> list[Tensor]:
        """Return the tensors of a cache as int64 [layers, blocks, block_size, words]."""
        seen = self._seen
        if seen is None or seen[0]() is not kv:
            with torch.inference_mode(False):  # as in `_Scratch`
                self._seen = seen = weakref.ref(kv), [tensor.flatten(3).view(torch.int64) for tensor in kv.tensors]
        return seen[1]

    def _constants(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return salt, odd factor [tensors, layers, 1, words] and odd weight [tensors, layers, positions, words]."""
        per_position = (len(self.layout.tensors), self.layout.layers, 1, self._words)
        positions = self.layout.blocks_for(self.max_model_len) * self.layout.block_size
        salt, odd = self._random(1, per_position), self._random(2, per_position) | 1
        salt[0, 0, 0, 0], odd[0, 0, 0, 0] = 0, 1
        return salt, odd, self._random(3, (*per_position[:2], positions, self._words)) | 1

    def _random(self, stream: int, shape: tuple[int, ...]) -> Tensor:
        count = torch.Size(shape).numel()
        first = signed64(mix64(stream))
        return mix64_tensor(torch.arange(count, dtype=torch.int64, device=self.device) + first).view(shape)
