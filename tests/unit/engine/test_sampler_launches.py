"""The number of launches of a sampled step on a GPU, without one: logits on the device `meta` take a GPU's branches.

Torch's operations are counted by a dispatch mode, and Triton's by stand-ins for the kernels. Views and allocations
launch nothing.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from baton.core import Sampling
from baton.engine.sampling.logits import Row
from baton.engine.sampling.sampler import Sampler

pytest.importorskip("triton", reason="no triton here (the dev extra has it on Linux)")

from baton.engine.kernels.gpu import triton_sampling

VOCAB = 151_936
NO_LAUNCH = {"empty", "new_empty", "empty_like", "detach", "alias", "view", "_unsafe_view", "select", "slice", "expand"}
NO_LAUNCH |= {"flatten", "view_as", "unsqueeze"}
KINDS = {
    "greedy": [{"temperature": 0.0}],
    "temperature": [{"temperature": 0.7}],
    "top-p": [{"top_p": 0.95}],
    "top-k and top-p": [{"top_k": 20, "top_p": 0.95}],
    "min-p": [{"min_p": 0.05}],
}
KINDS["mixed"] = [options for kind in list(KINDS.values()) for options in kind]


class Launches(TorchDispatchMode):
    """Counts operations that launch a kernel or a copy. A copy to the host returns zeros, as `meta` has no data."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, target = func._schema.name.split("::")[1], (kwargs or {}).get("device", torch.device("meta"))
        on_device = any(getattr(each, "is_meta", False) for each in torch.utils._pytree.tree_leaves((args, kwargs)))
        copies = name in ("to", "_to_copy")
        if name not in NO_LAUNCH and (on_device or (copies and target.type == "meta")):
            self.names.append("copy" if copies else name)
        if copies and on_device and target.type == "cpu":
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        return func(*args, **(kwargs or {}))


class StandIn:
    """In place of a Triton kernel: counts launches."""

    def __init__(self, name, names):
        self._name, self._names = name, names

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self._names.append(self._name)


@pytest.fixture
def launched(monkeypatch):
    """Return a function that returns the names of all launches of one sampled step, with its reading back."""

    def of(options, rows, guide=None):
        samplings = [Sampling(seed=i, **options[i % len(options)]) for i in range(rows)]
        inputs = [Row((1, 2, 3), sampling, (0,), VOCAB, guide) for sampling in samplings]
        sampler, logits = Sampler(triton_sampling.draw), torch.empty(rows, VOCAB, device="meta")
        with Launches() as counted, monkeypatch.context() as patch:
            for name in ("peak_kernel", "edge_kernel", "draw_kernel", "token_kernel"):
                patch.setattr(triton_sampling, name, StandIn(name, counted.names))
            for _ in range(2):  # the second step has the rows of the first
                counted.names.clear()
                sampler.draw(logits, inputs, [0] * rows).to("cpu")
        return counted.names

    return of


class AllowsAll:
    """A constraint that allows every token."""

    words = VOCAB // 32

    def fill(self, allowed):
        allowed[:] = -1


@pytest.mark.parametrize("rows", [1, 16, 64, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_has_at_most_six_launches(kind, rows, launched):
    names = launched(KINDS[kind], rows)
    assert names[0] == names[-1] == "copy", "the parameters and the tokens"
    assert {"peak_kernel", "token_kernel"} <= set(names)
    assert len(names) <= 6


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1},
        {"logit_bias": ((7, 1.0), (9, -1.0))},
        {"min_tokens": 5},
    ],
    ids=["penalties", "bias", "bans"],
)
def test_adjustments_cost_as_many_launches_for_one_row_as_for_256(options, launched):
    assert len(launched([options], 256)) == len(launched([options], 1)) <= 6 + 18


def test_constraints_cost_as_many_launches_for_one_row_as_for_256(launched):
    options = [{"temperature": 0.7}]
    assert len(launched(options, 256, AllowsAll())) == len(launched(options, 1, AllowsAll())) <= 6 + 5
