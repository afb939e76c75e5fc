"""The SDK: `Client`, `AsyncClient` and the plain values that they take and give. Loads neither torch nor ray."""

from baton.client.aio import AsyncClient, AsyncStream
from baton.client.sync import Client, Stream
from baton.client.types import (
    ChatMessage,
    Choice,
    ClusterStatus,
    Completion,
    Delta,
    Model,
    Options,
    Placement,
    Prompt,
    Timings,
    Usage,
    WorkerStatus,
)

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "ChatMessage",
    "Choice",
    "Client",
    "ClusterStatus",
    "Completion",
    "Delta",
    "Model",
    "Options",
    "Placement",
    "Prompt",
    "Stream",
    "Timings",
    "Usage",
    "WorkerStatus",
]
