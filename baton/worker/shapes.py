"""What the cluster file leaves to the host: addresses, and the shape of verify passes: as measured, else the preset."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import structlog
import torch

from baton.engine.kernels.cpu.build import machine, state_folder
from baton.engine.passes import WINDOW, load_passes
from baton.hashing import fingerprint
from baton.hub import model_folder
from baton.tokenizer import ORACLE_MODEL
from baton.worker.build import pick_device
from baton.worker.settings import located

if TYPE_CHECKING:
    from pathlib import Path

    from baton.worker.settings import WorkerSettings

log = structlog.get_logger(__name__)


def passes_path(settings: WorkerSettings) -> Path:
    """Where the times of verify passes lie: another processor or GPU, torch, model shape, dtype, number of ranks or of
    threads has others. What may differ between two workers of one kind is no part of it.

    Raises CheckpointError or OSError where there is no model.
    """
    device, model = pick_device(settings.device), model_folder(settings.model_path, weights=False)
    if device == "cpu":
        threads = torch.get_num_threads() if settings.threads is None else settings.threads
        here = machine().model, *sorted(machine().flags), f"{threads} threads"
    else:
        here = (torch.cuda.get_device_properties(torch.device(device)).name,)
    facts = (model / "config.json").read_text(), settings.dtype, f"{settings.tensor_parallel} ranks"
    return state_folder() / "profile" / f"{fingerprint((*facts, torch.__version__, *here))}-passes.json"


def settled(settings: WorkerSettings) -> WorkerSettings:
    """With the addresses, and the shape of verify passes, that a worker is to have here; tells the log which shape, and
    where it is from. Raises ConfigError about an address.
    """
    settings = located(settings)
    shapes, source = settings.shapes, "preset" if settings.auto_rows else "config"
    if settings.auto_rows and shapes.tokens == WINDOW and settings.model_path != ORACLE_MODEL:
        try:
            passes = load_passes(passes_path(settings))
        except OSError:  # whoever loads the model says it better
            passes = None
        if passes is not None:
            source, total = "profile", passes.best(exact=shapes.exact_rows > 0)
            shapes = replace(shapes, rows=total // WINDOW)
    log.info("verify_passes", rows=shapes.rows, tokens=shapes.tokens, source=source)
    return replace(settings, shapes=shapes)
