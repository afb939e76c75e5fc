"""The process of one step. It writes its result to a file."""

from __future__ import annotations

import importlib
import json
import os
import resource
import traceback
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu_first.at import At, Skipped, WrongResult

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

FIRST = "benchmarks.gpu_first.environment"


def run_step(module: str, out: str, log: str, environ: Mapping[str, str], *, dry: bool) -> None:
    """Run the step of this module in a session of its own, with this environment and its output in `log`."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environ)
    with open(log, "wb", buffering=0) as output:  # noqa: PTH123 - also for descriptors
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    from baton.logs import configure_logging

    configure_logging("warning", "auto")
    answer: dict[str, Any] = {"facts": facts()} | outcome_of(module, dry=dry)
    used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    answer["cpu_s"] = round(sum(each.ru_utime + each.ru_stime for each in used), 1)
    with open(f"{out}.new", "w", encoding="utf-8") as file:  # noqa: PTH123
        json.dump(answer, file)
    os.replace(f"{out}.new", out)  # noqa: PTH105 - whole or not there


def outcome_of(module: str, *, dry: bool) -> dict[str, Any]:
    """Return the status of a step with its figures or its reason. Any error is a failure of the step."""
    with ExitStack() as stack:
        try:
            if not dry and not torch.cuda.is_available():
                kind = WrongResult if module == FIRST else Skipped  # one failure for all
                raise kind("no GPU that this torch can use")
            at = At(torch.device("cpu") if dry else torch.device("cuda:0"), dry)
            if dry:
                torch.set_num_threads(1)
                stack.enter_context(_interpreter())
            outcome = importlib.import_module(module).run(at)
        except Skipped as reason:
            return {"status": "SKIP", "reason": str(reason)}
        except Exception as error:  # noqa: BLE001 - process boundary: the runner goes on with the next step
            traceback.print_exc()
            return {"status": "FAIL", "reason": f"{type(error).__name__}: {error}"}
    return {"status": "PASS", "figure": outcome.figure, "figures": outcome.figures}


def facts() -> dict[str, Any]:
    """Return the device and the versions. Those that are not there are None."""
    from baton.engine.kernels.gpu.driver import driver_version

    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "driver": driver_version()}
    try:
        found["triton"] = version_of("triton")
    except PackageNotFoundError:
        found["triton"] = None
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name(0)
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(0)))
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # its gap
    return found


def _interpreter() -> AbstractContextManager[None]:
    from benchmarks.lib.interpreter import rounded_as_on_a_gpu

    return rounded_as_on_a_gpu()
