"""Tensor parallelism, with threads as ranks: weight slices, errors, batches, sums, KV heads held and supplied."""

import itertools
import mmap
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.kernels.torch_reference import TorchKernels
from baton.engine.models.checkpoint import Checkpoint, Weights
from baton.engine.models.config import read_config
from baton.engine.tp import sharding
from baton.engine.tp.group import SharedExchange, memory_is_ordered
from baton.engine.tp.rank_process import body, lengths, unpack
from baton.engine.tp.sharding import Heads
from baton.errors import ConfigError, RankLost
from tests.unit.model.checkpoints import HIDDEN, random_checkpoint
from tests.unit.model.harness import Row, assert_same_batch, make_batch

HEADS, KV_HEADS, DIM, INNER = 8, 4, 6, 80
CPU = torch.device("cpu")
needs_order = pytest.mark.skipif(not memory_is_ordered(), reason="shared memory is used on x86-64 Linux alone")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen2")
    random_checkpoint(path, "qwen2", num_attention_heads=HEADS, num_key_value_heads=KV_HEADS)
    return path


def exchanges(size, capacity, *, timeout_s=20.0, alive=lambda: None):
    memory = mmap.mmap(-1, SharedExchange.nbytes(size, capacity))
    return [SharedExchange(memory, rank, size, capacity, timeout_s, alive) for rank in range(size)]


def on_all(ranks, call):
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(call, ranks))


@pytest.mark.parametrize("size", [2, 4])
def test_the_slices_of_all_ranks_are_the_whole(folder, size):
    whole = Weights(Checkpoint(folder), torch.float32, CPU)
    ranks = [
        sharding.ShardedWeights(Checkpoint(folder, digests=False), torch.float32, CPU, r, size) for r in range(size)
    ]
    name, outs = "model.layers.1.self_attn", (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
    own = tuple(out // size for out in outs)
    for kind, rest in (("weight", (HIDDEN,)), ("bias", ())):
        names = tuple(f"{name}.{part}_proj.{kind}" for part in "qkv")
        parts = [r.joined(names, own, *rest).split(own) for r in ranks]
        for index, (tensor, out) in enumerate(zip(names, outs, strict=True)):
            assert torch.equal(torch.cat([part[index] for part in parts]), whole.tensor(tensor, out, *rest))
    down = "model.layers.0.mlp.down_proj.weight"
    columns = [r.columns(down, HIDDEN, INNER // size) for r in ranks]
    assert torch.equal(torch.cat(columns, dim=1), whole.tensor(down, HIDDEN, INNER))
    norm = whole.tensor("model.norm.weight", HIDDEN)
    assert all(torch.equal(r.tensor("model.norm.weight", HIDDEN), norm) for r in ranks)


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
        weights = sharding.ShardedWeights(Checkpoint(folder), torch.float32, CPU, exchange.rank, size)
        head = sharding.ShardedParts(weights, kernels, exchange).head(embed, tied=True)
        return summed(x[:, columns], torch.empty(rows, HIDDEN)), head(hidden, torch.empty(rows, 199))

    results = on_all(exchanges(size, 250), run)  # 250 elements: two rows at a time, and a rest
    assert all(torch.equal(results[0][0], other) for other, _ in results)
    torch.testing.assert_close(results[0][0], x @ weight.T + bias)
    torch.testing.assert_close(results[0][1], hidden @ embed.T)


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
        (3, {}, r"num_attention_heads \(8\) and num_key_value_heads \(4\) and intermediate_size \(80\); .* 1, 2, 4$"),
        (8, {}, r" does not divide the model's num_key_value_heads \(4\); allowed are 1, 2, 4$"),
        (4, {"intermediate_size": 82}, r"intermediate_size \(82\); allowed are 1, 2$"),
        (2, {"family": "mixtral"}, "model of the family mixtral; set decode.tensor_parallel to 1"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(folder, size, changes, message):
    config = replace(read_config(folder), **changes)
    with pytest.raises(ConfigError, match=f"^decode.tensor_parallel: {size}.*{message}"):
        sharding.divided(config, size, "decode.tensor_parallel")


def test_a_rank_builds_a_smaller_model(folder):
    whole = read_config(folder)
    own = sharding.divided(whole, 4, "key")
    assert (own.heads, own.kv_heads, own.intermediate_size) == (2, 1, 20)
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


@given(layers=st.integers(1, 60), kv_heads=st.sampled_from([LATENT, 2, 4]), size=st.sampled_from(SIZES))
def test_replicas_share_the_layers_of_their_head(layers: int, kv_heads: int, size: int) -> None:
    heads = Heads(kv_heads, size)
    shares = [heads.supplied(rank, layers) for rank in range(size)]
    for first in range(0, size, heads.replicas):
        group = shares[first : first + heads.replicas]
        assert sorted(itertools.chain(*group)) == list(range(layers))
        assert max(map(len, group)) - min(map(len, group)) <= 1


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
