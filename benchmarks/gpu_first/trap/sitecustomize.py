"""Lets a worker's kernel trap when it receives SIGUSR2. Python imports it at the start of each process of step 10."""

import os
import signal
import sys

KIND = os.environ.get("BATON_TRAP", "")


def trap(*_: object) -> None:
    """Fail an assertion in a kernel, which spoils the CUDA context, or let forwards and checks raise the same error."""
    import torch

    if KIND == "device":
        torch._assert_async(torch.zeros(1, device="cuda:0"))
        return
    from baton.engine.models.loading import TransformerBackend

    def failing(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    for name in ("forward", "check"):
        setattr(TransformerBackend, name, failing)


if KIND and any(word.endswith("-worker") for word in sys.orig_argv):
    signal.signal(signal.SIGUSR2, trap)
