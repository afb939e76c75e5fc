"""The inference mode of torch, entered once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def inference(function: Callable[P, T]) -> Callable[P, T]:
    """Run the function in inference mode. It is not entered again if the caller is in it, because each entry of
    `torch.inference_mode` takes several microseconds.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode():
            return function(*args, **kwargs)

    return run
