"""Common parts of the steps: the machine, the results, and the reasons of a step that cannot run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch

    from baton.engine.kernels.gpu.ops import GpuKernels

T = TypeVar("T")
DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


class Skipped(Exception):
    """A step cannot run on this machine, for example because its GPU has too little memory."""


class WrongResult(Exception):
    """A step ran to its end and its results are wrong."""


class Outcome(NamedTuple):
    """The line of a step that passed, and its numbers for programs."""

    figure: str
    figures: dict[str, Any]


@dataclass(frozen=True, slots=True)
class At:
    """Where a step runs. A dry run is on the CPU, with Triton's interpreter and stand-ins, and has small sizes."""

    device: torch.device
    dry: bool

    def size(self, full: T, dry: T) -> T:
        """Return the size for a GPU, or the one of a dry run."""
        return dry if self.dry else full

    def kernels(self) -> GpuKernels:
        """Return the kernels of this GPU, or those that the interpreter runs."""
        from baton.engine.kernels.gpu.ops import GpuKernels  # needs Triton

        return GpuKernels(4) if self.dry else GpuKernels.on(self.device)


def require(right: bool, otherwise: str) -> None:
    """Raise WrongResult with this text unless `right`."""
    if not right:
        raise WrongResult(otherwise)
