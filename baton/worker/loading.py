"""What a worker's log says while it loads a model, and at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import structlog

if TYPE_CHECKING:
    from baton.engine.backend import ModelBackend
    from baton.engine.model.loader import LoadProgress

log = structlog.get_logger(__name__)
EVERY_S = 2.0
GB = 1e9


class LoadingLog:
    """Logs `model_loading` at the start and then at most every 2 s, and `model_loaded` once."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._last: LoadProgress | None = None
        self._next_s = 0.0

    def __call__(self, progress: LoadProgress) -> None:
        self._last = progress
        if progress.seconds < self._next_s:
            return
        self._next_s = progress.seconds + EVERY_S
        percent = int(100 * progress.bytes_done / progress.bytes_total)
        done, total = round(progress.bytes_done / GB, 3), round(progress.bytes_total / GB, 3)
        log.info("model_loading", model=self._model, percent=percent, gb=done, of_gb=total)

    def finish(self, backend: ModelBackend) -> None:
        """The model is there. `resident_gb` is this whole process's memory on the host."""
        if (last := self._last) is None:
            return
        log.info(
            "model_loaded",
            model=self._model,
            dtype=backend.layout.dtype,
            device=str(backend.device),
            tensors=last.tensors,
            seconds=round(last.seconds, 2),
            gb=round(last.bytes_done / GB, 3),
            gb_per_s=round(last.bytes_done / GB / max(last.seconds, 1e-3), 2),
            resident_gb=round(psutil.Process().memory_info().rss / GB, 3),
        )
