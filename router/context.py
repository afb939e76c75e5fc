"""The router context, shared by all requests: settings, workers, queue, metrics, and the running requests."""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from baton.clock import Clock
from baton.core import Role
from baton.errors import ConfigError
from baton.event_journal import History
from baton.ledger.prefix_index import PrefixIndex
from baton.metrics import Metrics
from baton.rpc.channel import Wire
from router.admission.admission import Admission, QueueLimits
from router.auth.tokens import TokenFile
from router.observe.activity import ActivityRecorder
from router.observe.request_observer import Sinks
from router.placement.policy import ALONE, POLICIES
from router.request.traces import Traces
from router.workers.placement import Placement
from router.workers.pool import WorkerPool, WorkerSource

if TYPE_CHECKING:
    from baton.config.schema import TlsConfig
    from baton.ledger.ownership import OwnershipRecord
    from baton.tracing.otlp import Exporter
    from router.request.client_request import ClientRequest


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """The settings of a router. Addresses are "host:port"; port 0 means any free port. Times are in seconds."""

    name: str  # of the cluster
    model: str  # as clients name it
    version: str = ""
    grpc: str = "127.0.0.1:50051"
    admin: str = "127.0.0.1:0"
    metrics: str = "127.0.0.1:9100"
    http: str | None = None  # None means no gateway in this process
    http_body: int = 2**20  # maximum bytes of an HTTP request body
    policy: str = "predicted"
    slo_ttft_s: float = 1.0  # the metrics count requests within both
    slo_itl_s: float = 0.1  # policy `predicted` also keeps to it where possible
    share_port: bool = False  # whether other routers listen on the same addresses
    colocated: bool = False  # decode workers compute all prompts; there are no prefill workers
    chunk: float = math.inf  # tokens that a decode worker computes per step
    local_prefill: bool = False  # also with prefill workers connected, if it is predicted to be faster
    attempts: int = 3  # per request, when workers are lost
    queue_max_requests: int = 256
    queue_max_tokens: int = 1_000_000
    queue_max_wait_s: float = 10.0
    tenants: Mapping[str, float] = field(default_factory=dict)  # weights by name, 1 by default
    max_request_s: float = 3600.0  # deadline of a request without its own
    client_stall_s: float = 30.0
    worker_silence_s: float = 15.0  # a worker without a message for this long is lost; several heartbeats
    history: str | None = None  # a folder; see `baton.event_journal`
    tls: TlsConfig | None = None
    tokens: str | None = None  # a file; see `router.auth.tokens`
    resumable_s: float = 0.0  # default time that a stream continues without a router
    think_while_decoding: bool = False  # default for requests to a model that thinks
    scale: Mapping[Role, tuple[int, int]] = field(default_factory=lambda: dict.fromkeys(Role, (1, 4096)))  # of pools
    drain_s: float = 60.0
    traces: int = 512
    otlp: str | None = None  # export address http://host:port; None means no export
    trace_sample: float = 1.0  # exported share of traces, if the caller does not decide


def _exporter(settings: RouterSettings) -> Exporter | None:
    if settings.otlp is None:
        return None
    try:
        from baton.tracing.otlp import Exporter
    except ModuleNotFoundError as error:
        text = f"{error.name} is not installed: pip install 'baton-serve[otel]', or leave tracing.otlp out"
        raise ConfigError(f"tracing.otlp: {text}") from error
    return Exporter(settings.otlp, settings.name, settings.version)


StreamSource = Callable[[str], Awaitable["OwnershipRecord | None"]]
"""Who goes on with a stream, by its client's name for it: `OwnershipStore.find`. Raises LedgerError."""


async def _nowhere(name: str) -> None:
    """Find no stream, without a ledger."""


class RouterContext:
    """The state shared by all requests. `prefixes` holds cached blocks, `streams` finds the decode worker of a stream.
    Raises ConfigError if certificates or tokens are unusable, or the exporter is not installed.
    """

    def __init__(
        self,
        settings: RouterSettings,
        workers: WorkerSource,
        clock: Clock,
        prefixes: PrefixIndex | None = None,
        streams: StreamSource | None = None,
    ) -> None:
        self.wire = Wire.of(settings.tls)
        self.tokens = TokenFile(settings.tokens) if settings.tokens else None
        self.settings = settings
        self.clock = clock
        self.router_id = f"router-{secrets.token_hex(4)}"
        self.history = History.open(settings.history, clock, "router", self.router_id)
        self.pool = WorkerPool(
            workers,
            POLICIES[settings.policy],
            self.router_id,
            settings.worker_silence_s,
            clock,
            self.wire,
            prefixes=prefixes,
            slo_itl_s=settings.slo_itl_s,
        )
        limits = QueueLimits(settings.queue_max_requests, settings.queue_max_tokens, settings.queue_max_wait_s)
        pool = self.pool
        self.admission = Admission(
            pool.place,
            Placement.release,
            pool.can_serve,
            clock,
            limits,
            settings.tenants,
            capability_of=attrgetter("capability"),
            why_not=pool.reasons_not_to_serve,
        )
        self.pool.on_change = self.admission.changed
        self.pool.local_prefill, self.pool.colocated = settings.local_prefill, settings.colocated
        self.pool.alone, self.pool.chunk = ALONE[settings.policy], settings.chunk
        self.metrics = Metrics(settings.name, settings.version, settings.model)
        self.metrics_at = ""
        self.pool.on_predicted = self.metrics.ttft_predicted
        self.metrics.watch_blocks(self.pool.blocks)
        self.metrics.watch_channels(self.pool.channels)
        self.metrics.watch_verifying(self.pool.loads)
        self.metrics.watch_queue(lambda: self.admission.waiting, lambda: self.admission.waiting_tokens)
        self.seen = ActivityRecorder(clock)
        exporter = _exporter(settings)
        self.traces = Traces(settings.traces, settings.trace_sample, clock, exporter.put if exporter else None)
        self.exporter = exporter
        slo = settings.slo_ttft_s, settings.slo_itl_s
        self.sinks = Sinks(self.router_id, clock, self.history, self.metrics, self.seen, self.traces, *slo)
        self.outcomes = self.sinks.outcomes
        self.streams = streams or _nowhere
        self.arrivals = itertools.count()
        self.accepting = True
        self.running: set[ClientRequest] = set()
        self.named: dict[tuple[str, str], ClientRequest] = {}  # by tenant, and request id or idempotency key
