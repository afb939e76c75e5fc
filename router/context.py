"""What all requests of a router share: settings, workers, queue, metrics, and the list of those that run."""

from __future__ import annotations

import itertools
import math
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.clock import Clock
from baton.core import Role
from baton.errors import ConfigError
from baton.event_journal import History
from baton.ledger.prefix_index import PrefixIndex
from baton.metrics import Metrics
from baton.rpc.channel import Wire
from router.admission.admission import Admission, QueueLimits
from router.admission.capability_wait import CapabilityWait
from router.auth.tokens import TokenFile
from router.observe.activity import ActivityRecorder
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
    """What a router is told. Addresses are "host:port", port 0 any free one. Times in seconds."""

    name: str  # of the cluster
    model: str  # as clients name it
    version: str = ""
    grpc: str = "127.0.0.1:50051"
    admin: str = "127.0.0.1:0"
    metrics: str = "127.0.0.1:9100"
    http: str | None = None  # None: no gateway in this process
    http_body: int = 2**20  # bytes that a request to it may have
    policy: str = "predicted"
    slo_ttft_s: float = 1.0  # of both it is counted how many requests kept to them
    slo_itl_s: float = 0.1  # policy `predicted` keeps to it where it can
    share_port: bool = False  # there are other routers at the same addresses
    colocated: bool = False  # there are no prefill workers, and none are missed
    chunk: float = math.inf  # tokens that a decode worker computes in one step
    local_prefill: bool = False  # also where a prefill worker is there, if it is expected to be sooner
    attempts: int = 3  # at one request, if workers are lost
    queue_max_requests: int = 256
    queue_max_tokens: int = 1_000_000
    queue_max_wait_s: float = 10.0
    tenants: Mapping[str, float] = field(default_factory=dict)  # weights by name; of all others 1
    max_request_s: float = 3600.0  # the deadline of a request whose caller set none
    client_stall_s: float = 30.0  # a client that takes nothing for this long is given up
    worker_silence_s: float = 15.0  # a worker that says nothing for this long is lost; several of its heartbeats
    history: str | None = None  # a folder; see `baton.event_journal`
    tls: TlsConfig | None = None
    tokens: str | None = None  # a file; see `router.auth.tokens`
    resumable_s: float = 0.0  # of requests that do not say how long they go on without a router
    think_while_decoding: bool = False  # of requests that do not say, if the model thinks
    scale: Mapping[Role, tuple[int, int]] = field(default_factory=lambda: dict.fromkeys(Role, (1, 4096)))  # of pools
    drain_s: float = 60.0  # for what a worker that is drained has
    traces: int = 512  # that are kept, of the requests that ended last
    otlp: str | None = None  # where they are sent to, http://host:port; None: nowhere
    trace_sample: float = 1.0  # the share of them that is, where the caller does not say


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
    """No ledger."""


class RouterContext:
    """One per router. `prefixes`: what workers have cached, `streams`: who decodes what, as far as it is known here.

    Raises ConfigError for files of certificates or tokens that cannot be used, or an exporter that is not there.
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
        self.admission = Admission(pool.place, Placement.release, pool.can_serve, clock, limits, settings.tenants)
        self.alike = CapabilityWait(pool.can_serve, pool.reasons_not_to_serve, clock, limits.wait_s, limits.requests)
        self.pool.on_change = self._changed
        self.pool.local_prefill, self.pool.colocated = settings.local_prefill, settings.colocated
        self.pool.alone, self.pool.chunk = ALONE[settings.policy], settings.chunk
        self.metrics = Metrics(settings.name, settings.version, settings.model)
        self.metrics_at = ""  # where others find them
        self.pool.on_predicted = self.metrics.ttft_predicted
        self.metrics.watch_blocks(self.pool.blocks)
        self.metrics.watch_channels(self.pool.channels)
        self.metrics.watch_verifying(self.pool.loads)
        self.metrics.watch_queue(lambda: self.admission.waiting, lambda: self.admission.waiting_tokens)
        self.seen = ActivityRecorder(clock)
        exporter = _exporter(settings)
        self.traces = Traces(settings.traces, settings.trace_sample, clock, exporter.put if exporter else None)
        self.exporter = exporter
        self.streams = streams or _nowhere
        self.arrivals = itertools.count()
        self.accepting = True
        self.running: set[ClientRequest] = set()
        self.named: dict[tuple[str, str], ClientRequest] = {}  # of these: by tenant, and request id or idempotency key
        self.outcomes: Counter[str] = Counter()  # of those before; "accepted" beside how each ended

    def _changed(self) -> None:
        """Room, or a worker, may be there that was not."""
        self.alike.changed()
        self.admission.changed()
