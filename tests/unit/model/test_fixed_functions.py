"""Fixed forwards compute functions such as `gelu` for whole vectors only, in each family."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from baton.engine.batch import StateRows
from baton.engine.determinism.checks import FixedRow, fixed_batch
from baton.engine.kernels.elementwise import GRAIN, VECTORS
from baton.engine.kernels.torch_reference import TorchKernels
from baton.engine.models import loading
from baton.engine.models.loading import load_model
from tests.unit.model.checkpoints import DENSE, LATENT, NATIVE, RECURRENT, SPARSE, VOCAB

FAMILIES = DENSE | LATENT | NATIVE | RECURRENT | SPARSE
FUNCTIONS = {"cos", "exp", "exp_", "expm1", "gelu", "log1p", "sigmoid", "silu", "sin", "softplus", "tanh", "tanh_"}
LENGTHS = (3, 17)  # 20 rows are no whole vector


class Watch(TorchDispatchMode):
    """Collects functions of other numbers than whole vectors, or of so many that threads share them anywhere."""

    def __init__(self):
        super().__init__()
        self.seen, self.wrong = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in FUNCTIONS:
            size = args[0].numel()
            self.seen.add(name)
            if args[0].dim() > 1 or size % VECTORS or size > 8 * GRAIN:  # `mapped` makes all shapes flat
                self.wrong.add((name, tuple(args[0].shape)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_functions_have_whole_vectors(family, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "choose_kernels", lambda *_: TorchKernels())
    FAMILIES[family].write(tmp_path, dtype=torch.float32)
    backend = load_model(tmp_path)
    rows = [FixedRow([at % VOCAB for at in range(count)], 0, [row, 2 + row]) for row, count in enumerate(LENGTHS)]
    batch = fixed_batch(rows, list(range(sum(LENGTHS))), backend.layout.block_size, backend.device)
    if size := backend.layout.state_size:
        states = StateRows(torch.zeros(2, size), [0, 1], list(LENGTHS), torch.arange(2), starts=[0, 3], fixed=True)
        batch = replace(batch, states=states)
    with Watch() as watch:
        backend.forward(batch, backend.make_cache(4))
    assert watch.seen
    assert watch.wrong == set()
