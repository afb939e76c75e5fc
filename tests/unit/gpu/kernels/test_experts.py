"""Products of a mixture of experts in one launch, against one product per expert."""

from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from baton.engine.kernels.base import Scratch
from baton.engine.kernels.gpu.ops import GpuKernels
from baton.engine.kernels.gpu.triton_experts import GroupedLinear
from baton.engine.kernels.torch_reference import TorchKernels
from baton.engine.models.checkpoint import Weights
from baton.engine.models.config import parse_config
from baton.engine.models.json_fields import Fields
from baton.engine.models.llama import Parts, Step
from baton.engine.models.moe import SparseMLP, feed_forward
from benchmarks.lib.random_weights import RandomCheckpoint

pytestmark = pytest.mark.sample(3)
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 97, "hidden_size": 40}
MIXTRAL |= {"intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
MIXTRAL |= {"num_local_experts": 5, "num_experts_per_tok": 2, "max_position_embeddings": 64}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def draw(shape, dtype, device, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("counts", [[1], [0, 3, 0], [17, 0, 1, 40, 16], [0, 0, 0, 0, 0, 2], [130, 70]])
@pytest.mark.parametrize(("width", "inner"), [(24, 40), (130, 65)])
def test_each_expert_computes_its_rows(counts, width, inner, dtype, device, seed):
    rows = sum(counts)
    weights, x = draw((len(counts), width, inner), dtype, device, seed), draw((rows, inner), dtype, device, seed + 1)
    experts = torch.repeat_interleave(torch.tensor(counts)).to(device)
    linear, out = GroupedLinear(weights), torch.full((rows, width), torch.nan, dtype=dtype, device=device)
    linear(x, linear.groups(experts, fixed=False), out)
    expected = torch.cat([own @ matrix.T for own, matrix in zip(x.split(counts), weights, strict=True)])
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def layer(kernels, dtype, device):
    config = parse_config(Fields("random", MIXTRAL))
    checkpoint = cast("Any", RandomCheckpoint(device, 0))
    made = feed_forward(config, Parts(Weights(checkpoint, dtype, device), kernels), "model.layers.0", 0)
    assert isinstance(made, SparseMLP)
    return made


def step_of(dtype, device, *, fixed=False):
    return Step(cast("Any", None), torch.empty(0), {}, Scratch(dtype, device), fixed=fixed)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_a_layer_equals_the_reference(rows, fixed, dtype, device, seed):
    x, found = draw((rows, 40), dtype, device, seed), []
    for kernels in (TorchKernels(), GpuKernels(4)):
        found.append(layer(kernels, dtype, device)(x.clone(), step_of(dtype, device, fixed=fixed)).clone())
    torch.testing.assert_close(found[1], found[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.usefixtures("products_by_row")
def test_a_fixed_row_has_the_same_bits_in_other_company(device, seed):
    """Alone, and as one of many rows at another place of a tile and behind those of another expert."""
    linear = GroupedLinear(draw((3, 24, 40), torch.float32, device, seed))
    x = draw((300, 40), torch.float32, device, seed + 1)
    found = []
    for rows, counts in ((x[137:138], [0, 1, 0]), (x, [100, 150, 50])):
        experts = torch.repeat_interleave(torch.tensor(counts)).to(device)
        groups = linear.groups(experts, fixed=True)
        found.append(linear(rows, groups, torch.empty(len(rows), 24, device=device)))
    assert torch.equal(found[0][0], found[1][137])


class Reads(TorchDispatchMode):
    """Operations whose result depends on values that the host must read from the device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in {"_local_scalar_dense", "nonzero", "bincount", "item", "unique_dim"}:
            self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_the_host_does_not_read_the_choice(device, monkeypatch, seed):
    """Kernels are not run: the interpreter reads memory, which a launch does not."""
    monkeypatch.setattr(GroupedLinear, "__call__", lambda self, x, groups, out: out.zero_())
    monkeypatch.setattr(GpuKernels, "gate", TorchKernels.gate)
    reads = {}
    for kernels in (TorchKernels(), GpuKernels(4)):
        mixture, step = layer(kernels, torch.float32, device), step_of(torch.float32, device)
        with Reads() as mode:
            mixture(draw((9, 40), torch.float32, device, seed), step)
        reads[kernels.name] = mode.found
    assert "bincount" in reads["torch"]
    assert reads["triton"] == []
