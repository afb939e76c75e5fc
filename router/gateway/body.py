"""What all bodies are: closed, strict, and not changed once they are read."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """Closed and strict."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
