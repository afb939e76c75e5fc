"""Baton: a disaggregated LLM server. `from baton import Client` is the SDK; it loads neither torch nor ray."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton import errors

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "__version__", "errors"]

if TYPE_CHECKING:
    from baton.client import AsyncClient, Client
else:

    def __getattr__(name: str) -> object:
        # Workers and the command line import parts of this package and must not load the SDK.
        if name not in {"AsyncClient", "Client"}:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from baton.client import AsyncClient, Client

        globals().update(AsyncClient=AsyncClient, Client=Client)
        return globals()[name]
