"""The SDK: `Client`, `AsyncClient` and their plain values. It loads neither torch nor ray.

Read `types` (the values), then `aio` (the client; `sync` is generated from it). Only the transports do I/O.
"""

from baton.client.aio import AsyncClient as AsyncClient
from baton.client.aio import AsyncStream as AsyncStream
from baton.client.sync import Client as Client
from baton.client.sync import Stream as Stream
from baton.client.types import ChatMessage as ChatMessage
from baton.client.types import Choice as Choice
from baton.client.types import ClusterStatus as ClusterStatus
from baton.client.types import Completion as Completion
from baton.client.types import Control as Control
from baton.client.types import Delta as Delta
from baton.client.types import Model as Model
from baton.client.types import Options as Options
from baton.client.types import Placement as Placement
from baton.client.types import Prompt as Prompt
from baton.client.types import Thought as Thought
from baton.client.types import Timings as Timings
from baton.client.types import ToolCall as ToolCall
from baton.client.types import Usage as Usage
from baton.client.types import WorkerStatus as WorkerStatus
from baton.tracing.trace import Span as Span
