"""Tensor parallelism, with threads as ranks: weight slices, errors, batches, sums, KV heads held and supplied."""

import itertools
import mmap
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from unittest.mock import Mock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from baton.engine.kernels.torch_reference import TorchKernels
from baton.engine.models.checkpoint import Checkpoint, Weights
from baton.engine.models.config import read_config
from baton.engine.models.formats.compressed_tensors import Integers
from baton.engine.models.loading import load_model
from baton.engine.tp import sharding
from baton.engine.tp.group import SharedExchange, memory_is_ordered
from baton.engine.tp.rank_process import Split, body, lengths, unpack
from baton.engine.tp.sharding import Heads, ShardedWeights, read_plan
from baton.errors import ConfigError, RankLost
from tests.support import weight_formats as formats
from tests.unit.model.checkpoints import HIDDEN, VOCAB, edit_tensors, random_checkpoint
from tests.unit.model.harness import Row, assert_same_batch, make_batch

HEADS, KV_HEADS, DIM, INNER = 8, 4, 6, 80
INT4 = Integers(bits=4, size=32).format()
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
CPU = torch.device("cpu")
needs_order = pytest.mark.skipif(not memory_is_ordered(), reason="shared memory is used on x86-64 Linux alone")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    @cache
    def folder(kv_heads):
        made = tmp_path_factory.mktemp("qwen2")
        random_checkpoint(made, "qwen2", num_attention_heads=HEADS, num_key_value_heads=kv_heads)
        return made

    return folder


@pytest.fixture
def folder(folder_of):
    return folder_of(KV_HEADS)


def exchanges(size, capacity, *, timeout_s=120.0, alive=lambda: None):
    memory = mmap.mmap(-1, SharedExchange.nbytes(size, capacity))
    return [SharedExchange(memory, rank, size, capacity, timeout_s, alive) for rank in range(size)]


def on_all(ranks, call):
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(call, ranks))


def weights_of(folder, rank, size, kv_heads=KV_HEADS):
    return sharding.ShardedWeights(Checkpoint(folder, digests=False), torch.float32, CPU, rank, Heads(kv_heads, size))


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_slices_of_all_ranks_are_the_whole(folder_of, kv_heads, size):
    """Each rank has the rows of its own heads. Ranks that hold the same KV head have the same rows."""
    folder, heads = folder_of(kv_heads), Heads(kv_heads, size)
    whole = Weights(Checkpoint(folder), torch.float32, CPU)
    ranks = [weights_of(folder, rank, size, kv_heads) for rank in range(size)]
    name, outs = "model.layers.1.self_attn", (HEADS * DIM, kv_heads * DIM, kv_heads * DIM)
    own = (HEADS * DIM // size, heads.per_rank * DIM, heads.per_rank * DIM)
    for kind, rest in (("weight", (HIDDEN,)), ("bias", ())):
        names = tuple(f"{name}.{part}_proj.{kind}" for part in "qkv")
        q, k, v = (whole.tensor(tensor, out, *rest) for tensor, out in zip(names, outs, strict=True))
        for rank, weights in enumerate(ranks):
            held = heads.held(rank)
            rows = slice(held.start * DIM, held.stop * DIM)
            expected = torch.cat((q.chunk(size)[rank], k[rows], v[rows]))
            assert torch.equal(weights.joined(names, own, *rest), expected), (kind, rank)
    down = "model.layers.0.mlp.down_proj.weight"
    columns = [r.columns(down, HIDDEN, INNER // size) for r in ranks]
    assert torch.equal(torch.cat(columns, dim=1), whole.tensor(down, HIDDEN, INNER))
    norm = whole.tensor("model.norm.weight", HIDDEN)
    assert all(torch.equal(r.tensor("model.norm.weight", HIDDEN), norm) for r in ranks)


@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_reads_only_its_slices(tmp_path, monkeypatch, tied):
    """All of the embedding, which each rank needs whole, and of the norms. The output head is divided."""
    size, kv_heads, layers = 4, 2, 2
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": kv_heads, "tie_word_embeddings": tied}
    random_checkpoint(tmp_path, "llama", num_hidden_layers=layers, **sizes)
    read, copy = list[int](), ShardedWeights._copy

    def counted(weights, place, source, stored):
        read.append(source.numel())
        copy(weights, place, source, stored)

    monkeypatch.setattr(ShardedWeights, "_copy", counted)
    plan = Mock(folder=str(tmp_path), size=size, key="key", quantize="none")
    ranks = Mock(rank=1, device=CPU, exchange=Mock(size=size, rank=1))
    load_model(tmp_path, split=Split(plan, ranks))
    attention = (HEADS // size * 2 + 2) * DIM * HIDDEN  # q and o, and one head of k and v
    layer = attention + 3 * INNER // size * HIDDEN + 2 * HIDDEN
    head = 0 if tied else (VOCAB * 2 // size - VOCAB // size) * HIDDEN
    assert sum(read) == layers * layer + VOCAB * HIDDEN + HIDDEN + head


@needs_order
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("rows", [1, 7])
def test_divided_layers_are_the_whole_layer(folder, size, rows):
    """A row-parallel layer adds its bias once. No number of ranks divides the head of 199 tokens."""
    kernels, generator = TorchKernels(), torch.Generator().manual_seed(0)
    shapes = (rows, INNER), (HIDDEN, INNER), (HIDDEN,), (rows, HIDDEN), (199, HIDDEN)
    x, weight, bias, hidden, embed = (torch.randn(shape, generator=generator) for shape in shapes)

    def run(exchange):
        inner = INNER // size
        columns = slice(exchange.rank * inner, (exchange.rank + 1) * inner)
        part = kernels.linear(weight[:, columns], bias if exchange.rank == 0 else None)
        summed = sharding.Summed(part, exchange)
        weights = weights_of(folder, exchange.rank, size)
        head = sharding.ShardedParts(weights, kernels, exchange).head(embed, tied=True)
        return summed(x[:, columns], torch.empty(rows, HIDDEN)), head(hidden, torch.empty(rows, 199))

    results = on_all(exchanges(size, 250), run)  # 250 elements: two rows at a time, and a rest
    assert all(torch.equal(results[0][0], other) for other, _ in results)
    torch.testing.assert_close(results[0][0], x @ weight.T + bias)
    torch.testing.assert_close(results[0][1], hidden @ embed.T)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_projection_that_all_ranks_need_is_whole_if_it_is_packed(tmp_path, rank):
    """Latent attention has such ones."""
    random_checkpoint(tmp_path, "llama")
    name, parts = "model.layers.0.self_attn.k_proj", dict[str, torch.Tensor]()

    def packed(tensors):
        found, values = formats.compressed(tensors.pop(f"{name}.weight"), "int-quantized", INT8)
        tensors |= {f"{name}.{part}": each for part, each in found.items()}
        parts["values"] = values

    edit_tensors(tmp_path, packed)
    stored = Checkpoint(tmp_path, stored=Integers(bits=8, packed=False).format(), packs=True)
    weights = ShardedWeights(stored, torch.float32, CPU, rank, Heads(2, 2))
    layer = sharding.ShardedParts(weights, TorchKernels(), Mock(rank=rank, size=2)).whole(name, 24, HIDDEN, bias=False)
    x = torch.randn(3, HIDDEN)
    torch.testing.assert_close(layer(x, torch.empty(3, 24)), x @ parts["values"].T)


@needs_order
def test_many_sums_in_a_row(seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    parts = [torch.randn(3, rng.randint(1, 9), rng.randint(1, 30), generator=generator) for _ in range(400)]

    def run(exchange):
        for part in parts:
            exchange.place(*part.shape[1:]).copy_(part[exchange.rank])
            first, second, third = exchange.swap()
            assert torch.equal(first + second + third, part[0] + part[1] + part[2])

    on_all(exchanges(3, 300), run)


DEAD = {"alive": Mock(side_effect=RankLost("rank 1 was ended by SIGKILL"))}


@needs_order
@pytest.mark.parametrize(
    ("options", "message"), [({"timeout_s": 0.2}, r"rank 1 .* no progress for 0.2 s"), (DEAD, "SIGKILL")]
)
def test_a_silent_rank_and_a_dead_one(options, message):
    first, _ = exchanges(2, 8, **options)
    first.place(1, 8).zero_()
    with pytest.raises(RankLost, match=message):
        first.swap()


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (3, {}, r"num_attention_heads \(8\) and num_key_value_heads \(4\) and intermediate_size \(80\); .* 2, 4, 8$"),
        (4, {"heads": 24, "kv_heads": 6}, r" does not divide the model's num_key_value_heads \(6\); allowed are 1, 2$"),
        (16, {}, r"num_attention_heads \(8\); allowed are 1, 2, 4, 8$"),
        (4, {"intermediate_size": 82}, r"intermediate_size \(82\); allowed are 1, 2$"),
        (2, {"quantised": INT4}, r"o_proj \(48 inputs in groups of 32\) and down_proj \(80 .* of 32\); allowed are 1$"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(folder, size, changes, message):
    config = replace(read_config(folder), **changes)
    with pytest.raises(ConfigError, match=f"^decode.tensor_parallel: {size}.*{message}"):
        sharding.divided(config, size, "decode.tensor_parallel")


def test_quantising_on_load_cuts_no_group(folder):
    config = replace(read_config(folder), head_dim=8, intermediate_size=128)
    sharding.divided(config, 8, "key", "int8")
    sharding.divided(config, 2, "key", "int4")
    with pytest.raises(ConfigError, match=r"key: 4 does not divide the model's o_proj \(64 inputs in groups of 32\)"):
        sharding.divided(config, 4, "key", "int4")


def test_a_rank_builds_a_smaller_model(folder):
    whole = read_config(folder)
    own = sharding.divided(whole, 4, "key")
    assert (own.heads, own.kv_heads, own.intermediate_size) == (2, 1, 20)
    assert sharding.divided(whole, 8, "key").kv_heads == 1, "two ranks share a head"
    assert replace(own, heads=HEADS, kv_heads=KV_HEADS, intermediate_size=INNER) == whole


@pytest.mark.parametrize("fixed", [False, True])
def test_a_batch_arrives_as_it_was(fixed):
    rows = [Row([5, 6, 7, 8, 9], 9, computed=1, blocks=[4, 2, 7]), Row([1, 2], 9, computed=1, blocks=[9])]
    batch = replace(make_batch(rows, [4, 1], [[0, 3], [0]], 2), fixed=fixed)
    assert_same_batch(unpack(lengths(batch), body(batch)), batch)


SIZES = (1, 2, 4, 8)
LATENT = 1  # KV heads of latent attention


def held_by_definition(kv_heads: int, size: int, rank: int) -> list[int]:
    """Return contiguous shares, or the one head at this rank's place among the ranks."""
    if kv_heads >= size:
        return [head for head in range(kv_heads) if head * size // kv_heads == rank]
    return [rank * kv_heads // size]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kv_heads", [LATENT, 2, 4, 8, 16])
def test_what_each_rank_holds(kv_heads: int, size: int) -> None:
    heads = Heads(kv_heads, size)
    held = [list(heads.held(rank)) for rank in range(size)]
    assert held == [held_by_definition(kv_heads, size, rank) for rank in range(size)]
    assert {len(each) for each in held} == {heads.per_rank}
    assert Counter(itertools.chain(*held)) == dict.fromkeys(range(kv_heads), heads.replicas)


@given(st.integers(1, 60), st.integers(1, 16), st.sampled_from(SIZES), st.sampled_from(SIZES))
def test_each_head_of_each_layer_is_read_once_from_a_rank_that_holds_it(
    layers: int, kv_heads: int, sources: int, readers: int
) -> None:
    """Each rank of the reader gets what it holds. Replicas at the source supply equal shares, except for one layer."""
    assume(all(kv_heads % size == 0 or size % kv_heads == 0 for size in (sources, readers)))
    source, reader, load = Heads(kv_heads, sources), Heads(kv_heads, readers), Counter[tuple[int, int]]()
    for rank in range(readers):
        read: Counter[tuple[int, int]] = Counter()
        for giver, rows, heads in read_plan(source, reader, rank, layers):
            assert set(heads) <= set(source.held(giver))
            read.update(itertools.product(rows, heads))
            load.update({(head, giver): len(rows) for head in heads})
        assert read == Counter(itertools.product(range(layers), reader.held(rank)))
    for head in range(kv_heads):
        shares = [load[head, giver] for giver in range(sources) if head in source.held(giver)]
        assert max(shares) - min(shares) <= 1


def test_sides_with_other_heads_have_no_plan() -> None:
    with pytest.raises(ValueError, match="2 KV heads at the source and 4 at the reader"):
        read_plan(Heads(2, 2), Heads(4, 2), 0, 3)


@pytest.mark.parametrize(
    ("kv_heads", "size", "why"),
    [
        (6, 4, "6 KV heads cannot be divided among 4 ranks: neither number divides the other"),
        (4, 6, "4 KV heads cannot be divided among 6 ranks: neither number divides the other"),
        (3, 2, "3 KV heads cannot be divided among 2 ranks"),
        (0, 1, "0 KV heads on 1 ranks: both must be at least 1"),
        (2, 0, "2 KV heads on 0 ranks: both must be at least 1"),
        (-4, 2, "-4 KV heads on "),
    ],
)
def test_what_no_ranks_can_hold_is_refused_with_both_numbers(kv_heads: int, size: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Heads(kv_heads, size)
