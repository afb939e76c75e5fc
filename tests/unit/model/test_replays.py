"""Replayed forwards have the bits of others, whatever happens between two steps. Torch must compute nothing in them."""

import random
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from baton.engine.engine import Engine
from baton.engine.kernels.base import Scratch
from baton.engine.kernels.cpu.compiler import load_library
from baton.engine.kernels.cpu.kernel_choice import Choice, Profile
from baton.engine.kernels.cpu.ops import ELEMENTS, CpuKernels
from baton.engine.kernels.cpu.replay import Replays
from baton.engine.kernels.inference import inference
from baton.engine.models import loading
from baton.engine.models.config import read_config
from baton.engine.models.loading import load_model
from baton.engine.models.rotary import Rotary
from baton.tokenizer import load_tokenizer
from tests.support.compiled_kernels import compiled_or_skip
from tests.support.engines import key_of, spec_of
from tests.support.paged_attention import batch_over, paged
from tests.unit.model.checkpoints import DENSE, NATIVE, SPARSE, VOCAB, Variant, window
from tests.unit.model.harness import Row, make_batch, poisoned_cache

REPLAYED = {
    "llama": Variant("llama", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "llama-gelu": Variant("llama", {"head_dim": 32, "hidden_act": "gelu", "num_key_value_heads": 1}),
    "mistral-window": Variant("mistral", {"sliding_window": 24, "head_dim": 16}),
    "qwen2-window": Variant(
        "qwen2", {"max_window_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 3} | window(40)
    ),
    "qwen3-layer-types": DENSE["qwen3-layer-types"],
}
NOT_REPLAYED = {
    "head size": DENSE["llama"],  # 12: attention by torch
    "experts": SPARSE["mixtral-all"],
    "norms": NATIVE["gemma2"],
    "scaled residuals": NATIVE["granite"]._replace(settings=NATIVE["granite"].settings | {"head_dim": 16}),
}
MOST, BLOCKS = 90, 64
DEMO = Path(__file__).parents[3] / "models/demo"


class Steps:
    """Random steps of one model over two caches: with replays, and without."""

    def __init__(self, backend, seed):
        self.backend, self.rng = backend, random.Random(seed)
        self.kv, self.other = poisoned_cache(backend, BLOCKS), poisoned_cache(backend, BLOCKS)
        self.free = self.rng.sample(range(BLOCKS), BLOCKS)
        self.rows: list[Row] = []

    def step(self, chunks, wanted=None, **changes):
        """Compute so many tokens of the first rows with and without replays, and compare the bits of wanted logits. By
        default, these are the last ones of each row.
        """
        while len(self.rows) < len(chunks):
            self.rows.append(Row([self.rng.randrange(VOCAB) for _ in range(400)], 0))
        rows, size = self.rows[: len(chunks)], self.backend.layout.block_size
        for row, chunk in zip(rows, chunks, strict=True):
            while len(row.blocks) * size < row.computed + chunk:
                row.blocks.append(self.free.pop())
        batch = make_batch(rows, chunks, wanted or [[chunk - 1] for chunk in chunks], size)
        batch = replace(batch, **changes)
        model, replays = self.backend.model, self.backend.model.replays
        found = self.backend.forward(batch, self.kv).clone(), model.hidden.clone()
        model.replays = None
        expected = self.backend.forward(batch, self.other).clone(), model.hidden
        model.replays = replays
        for left, right in zip(found, expected, strict=True):
            assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))
        for row, chunk in zip(rows, chunks, strict=True):
            row.computed += chunk

    def check_caches(self):
        for one, other in zip(self.kv.tensors, self.other.tensors, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def loaded(folder, variant, dtype=torch.float32, **options):
    compiled_or_skip(lambda: load_library(ELEMENTS[dtype]))
    variant.write(folder, dtype=dtype)
    return load_model(folder, **options)


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", REPLAYED)
def test_steps_have_the_bits_of_forwards_without_replays(family, dtype, threads, tmp_path, seed):
    """A prompt between steps moves the scratch. Batches of several sizes and kinds take turns."""
    backend = loaded(tmp_path, REPLAYED[family], dtype)
    steps = Steps(backend, seed)
    for chunks in ([1], [1], [1], [5, 1, 1], [1, 3, 3], [1, 1, 1], [1, 1, 1], [MOST], [1], [1], [1, 1, 1], [1]):
        steps.step(chunks)
        steps.step(chunks[:1], fixed=True)
    steps.check_caches()
    assert backend.model.replays.count >= 8


def test_rows_of_one_sequence_and_of_several_take_turns(tmp_path, seed):
    """A speculated step wants logits of all rows of a sequence. Only the cut of the batch differs."""
    steps = Steps(loaded(tmp_path, REPLAYED["llama"]), seed)
    for chunks in ([1, 1, 1], [1, 1, 1], [3], [1, 1, 1], [2, 1], [3], [1, 2], [1, 1, 1]):
        steps.step(chunks, [list(range(chunk)) for chunk in chunks])
    steps.check_caches()
    assert steps.backend.model.replays.count == 6


@pytest.mark.parametrize("at", [1, 2])  # while it is recorded, and in a replay
def test_a_listener_that_fails_spoils_nothing(at, tmp_path, seed):
    steps, layers = Steps(loaded(tmp_path, REPLAYED["llama"]), seed), list[int]()

    def fail(layer):
        raise OSError(layer)

    for n in range(6):
        if n == at:
            with pytest.raises(OSError, match="0"):
                steps.step([1], on_layer=fail)
        steps.step([1], on_layer=layers.append)
    steps.check_caches()
    assert layers == [0, 1] * 2 * 6
    assert steps.backend.model.replays.count == 4


@pytest.mark.parametrize(("quantize", "kv_dtype"), [("int8", "auto"), ("int4", "int8")])
def test_quantised_weights_and_an_int8_cache_are_replayed(quantize, kv_dtype, tmp_path, seed):
    backend = loaded(tmp_path, REPLAYED["llama"], quantize=quantize, kv_dtype=kv_dtype)
    steps = Steps(backend, seed)
    for chunks in ([1], [1], [1, 1], [MOST, 3], [1, 1], [1], [1], [1, 1]):
        steps.step(chunks)
    steps.check_caches()
    assert backend.model.replays.count >= 2


@pytest.mark.parametrize("family", NOT_REPLAYED)
def test_layers_that_torch_computes_are_not_replayed(family, tmp_path, seed):
    steps = Steps(loaded(tmp_path, NOT_REPLAYED[family]), seed)
    for _ in range(4):
        steps.step([1, 1])
    steps.check_caches()
    assert steps.backend.model.replays.count == 0


def test_another_cache_is_not_written_by_old_records(tmp_path, seed):
    steps = Steps(loaded(tmp_path, REPLAYED["llama"]), seed)
    for _ in range(3):
        steps.step([1])
    assert steps.backend.model.replays.count == 1
    before = steps.kv  # still there
    steps.kv, steps.other = poisoned_cache(steps.backend, BLOCKS), poisoned_cache(steps.backend, BLOCKS)
    steps.rows = []
    for _ in range(3):
        steps.step([1])
    steps.check_caches()
    assert steps.backend.model.replays.count == 2
    del before


def test_another_number_of_threads_has_its_own_record(tmp_path, seed):
    steps, before = Steps(loaded(tmp_path, REPLAYED["llama"]), seed), torch.get_num_threads()
    try:
        for threads in (1, 1, 1, 2, 2, 2, 1):
            torch.set_num_threads(threads)
            steps.step([1])
    finally:
        torch.set_num_threads(before)
    assert steps.backend.model.replays.count == 3


def test_a_listener_to_layers_is_called_once_their_keys_are_written(tmp_path, seed):
    """Decode workers have one. It is the same record with and without."""
    steps, written = Steps(loaded(tmp_path, REPLAYED["llama"]), seed), list[tuple[int, list[bool]]]()

    def listen(layer):
        slot = steps.rows[0].computed
        place = steps.rows[0].blocks[slot // 16], slot % 16
        cache = steps.kv if len(written) % 4 < 2 else steps.other
        written.append((layer, [bool(keys[place].isfinite().all()) for keys, _ in cache.of_layers]))

    for n in range(6):
        steps.step([1], on_layer=None if n == 4 else listen)
    steps.check_caches()
    assert steps.backend.model.replays.count == 4
    assert written == [(0, [True, False]), (1, [True, True])] * 2 * 5


def test_one_number_of_rows_that_torch_computes_does_not_stop_others(tmp_path, seed, monkeypatch):
    """Two rows take the compiled product, and four torch's, as on processors with AMX."""
    profile = Profile(static=Choice(2, tall=False))
    monkeypatch.setattr(loading, "choose_kernels", lambda *_: kernels_of(profile=profile))
    steps = Steps(loaded(tmp_path, REPLAYED["llama"]), seed)
    for rows in (1, 1, 1, 4, 4, 4, 1, 1, 2, 2, 2):
        steps.step([1] * rows)
    assert steps.backend.model.replays.count == 3


def test_an_engine_with_a_listener_replays_its_decode_steps(tmp_path, seed):
    """As a decode worker does, which watches layers on a CPU."""
    backend = loaded(tmp_path, REPLAYED["llama"])
    engine, layers = Engine(backend, load_tokenizer(DEMO), total_blocks=32), list[int]()
    engine.watch(lambda _, layer: layers.append(layer), lambda _: None)
    engine.submit(key_of(), spec_of([1, 2, 3], max_tokens=8))
    for _ in range(8):
        engine.step()
    assert backend.model.replays.count == 7 - 2
    assert layers == [0, 1] * 8


def kernels_of(unified_max=None, profile=None):
    profile = profile or Profile(static=Choice(1 << 20, tall=True), unified_max=unified_max)
    return compiled_or_skip(lambda: CpuKernels(torch.float32, profile))


def of_rows(batch, slots):
    """Return the batch with these slots, and logits of all rows."""
    return replace(batch, slot_mapping=slots, logit_rows=torch.arange(len(slots)))


def replaying(kernels, batch, layers, times, attends=()):
    """Return the replays after so many forwards with these layers."""
    replays = Replays(kernels, Scratch(torch.float32, torch.device("cpu")))
    batch = of_rows(batch, torch.zeros(sum(batch.query_lens), dtype=torch.int64))
    with torch.inference_mode():
        for _ in range(times):
            replays(batch, Scratch, attends, layers)
    return replays


def test_fixed_batches_have_their_own_record():
    """They take another product for two rows here."""
    kernels = compiled_or_skip(lambda: CpuKernels(torch.float32, Profile(static=Choice(1, tall=True))))
    x, linear = torch.randn(2, 999), kernels.linear(torch.randn(40, 999))
    batches = [batch_over(torch.zeros(2, 1, dtype=torch.int32), [1, 1], [1, 1], fixed=fixed) for fixed in (False, True)]
    expected = []
    for batch in batches:
        kernels.begin(batch)
        expected.append(linear(x, torch.empty(2, 40)))
    assert not torch.equal(*expected)
    replays, out = Replays(kernels, Scratch(torch.float32, torch.device("cpu"))), torch.empty(2, 40)
    slots = torch.zeros(2, dtype=torch.int64)
    batches = [of_rows(batch, slots) for batch in batches]
    for _ in range(4):
        for batch, product in zip(batches, expected, strict=True):
            kernels.begin(batch)
            replays(batch, Scratch, (), lambda _: linear(x, out))
            assert torch.equal(out, product)
            out.zero_()
    assert replays.count == 4


@pytest.mark.parametrize(("rows", "count"), [(64, 2), (65, 0)])
def test_many_rows_are_not_replayed(rows, count):
    x, weight, kernels = torch.randn(rows, 16), torch.ones(16), kernels_of()
    batch, out = batch_over(torch.zeros(1, 30, dtype=torch.int32), [rows], [rows]), torch.empty(rows, 16)
    assert replaying(kernels, batch, lambda _: kernels.rms_norm(x, None, weight, 1e-5, out), 4).count == count


def test_layers_of_several_sizes_that_share_an_attention_are_not_replayed(seed):
    """Each cuts the batch anew, and a replay has only the last cut."""
    data, kernels = paged(seed, [(1, 30)], heads=4, kv_heads=2, dim=16), kernels_of()
    attend = kernels.attention(data.batch, 4, None, 0.25)
    out, few = torch.empty(1, 64), data.query[:, :2].contiguous()

    def layers(_):
        attend(data.query, data.keys, data.values, out)
        attend(few, data.keys, data.values, out[:, :32])

    assert replaying(kernels, data.batch, layers, 4, [attend]).count == 0


def test_attention_of_another_kind_is_not_replayed(seed):
    data, kernels = paged(seed, [(1, 30)], heads=4, kv_heads=2, dim=16), kernels_of()
    attend, out = kernels.attention(data.batch, 4, None, 0.25), torch.empty(1, 64)

    def counting(*args):
        return attend(*args)

    def layers(_):
        return counting(data.query, data.keys, data.values, out)

    assert replaying(kernels, data.batch, layers, 4, [counting]).count == 0


def test_rows_that_left_the_unified_maximum_are_counted_in_replays(seed):
    data, kernels = paged(seed, [(1, 30)], heads=4, kv_heads=2, dim=16), kernels_of(unified_max=1000.0)
    attend, out = kernels.attention(data.batch, 4, None, 0.25), torch.empty(1, 64)
    count = replaying(kernels, data.batch, lambda _: attend(data.query, data.keys, data.values, out), 5, [attend]).count
    assert (count, kernels.fallbacks) == (3, 5 * 4)


@pytest.mark.parametrize(
    ("compute", "count"),
    [
        (lambda x: x.view(-1)[2:].unsqueeze(0), 2),
        (lambda x: x.flatten(0), 2),
        (lambda x: x[:, :5].flatten(0), 0),  # a copy
        (lambda x: x.add_(1), 0),
        (lambda x: x.chunk(2, 1)[0].contiguous(), 0),
    ],
)
def test_only_views_may_be_between_kernels(compute, count, seed):
    x, weight, kernels = torch.randn(2, 16), torch.ones(16), kernels_of()
    out, batch = torch.empty(2, 16), batch_over(torch.zeros(2, 1, dtype=torch.int32), [1, 1], [1, 1])

    def layers(_):
        compute(x)
        return kernels.rms_norm(x, None, weight, 1e-5, out)

    assert replaying(kernels, batch, layers, 4).count == count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotations_of_a_table_that_grows_are_those_of_fixed_forwards(dtype, tmp_path, seed):
    DENSE["llama-yarn"].write(tmp_path)
    rope, rng, scratch = read_config(tmp_path).spec.ropes[0], random.Random(seed), Scratch(dtype, torch.device("cpu"))
    rotary = Rotary(rope, dtype, torch.device("cpu"), 24)  # more than the dimensions that rotate
    for last in (0, 5, 1023, 1024, 7, 5000, 4096):
        positions = torch.tensor([rng.randint(0, last) for _ in range(rng.randint(0, 9))] + [last])
        for found, expected in zip(rotary.looked_up(positions, scratch, 1), rotary(positions, fixed=True), strict=True):
            assert torch.equal(found, expected)
            assert found.dtype is dtype


def test_inference_mode_is_entered_once_and_left():
    entered = []

    @inference
    def inner(n):
        entered.append(torch.is_inference_mode_enabled())
        if n:
            inner(n - 1)
            raise KeyError(n)

    with patch.object(torch, "inference_mode", wraps=torch.inference_mode) as mode, pytest.raises(KeyError):
        inner(1)
    assert (entered, mode.call_count, torch.is_inference_mode_enabled()) == ([True, True], 1, False)
