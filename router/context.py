"""The settings of a router, and its parts: workers, queue, running requests, and the sinks of observations."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from baton.clock import Clock
from baton.core import Role
from baton.errors import ConfigError
from baton.event_journal import History
from baton.ledger.prefix_index import PrefixIndex
from baton.limits import MAX_REQUEST_SECONDS
from baton.metrics import Metrics
from baton.receipts.issuer import Issuer
from baton.receipts.keys import ReceiptKey
from baton.rpc.channel import Wire
from router.activity import ActivityRecorder
from router.admission.admission import QueueLimits
from router.admission.promising import Promises, PromisingAdmission
from router.auth.tokens import TokenFile
from router.placement.policy import ALONE, POLICIES
from router.request.client_request import RunningRequests
from router.request.lifecycle import Dispatch, StreamSource
from router.request.observer import Sinks
from router.request.traces import Traces
from router.workers.placement import Placement
from router.workers.pool import PoolOptions, WorkerPool, WorkerSource

if TYPE_CHECKING:
    from baton.config.schema import TlsConfig
    from baton.tracing.otlp import Exporter


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """The settings of a router. Addresses are "host:port"; port 0 means any free port. Times are in seconds."""

    name: str  # of the cluster
    model: str  # its name as clients are shown it
    version: str = ""
    grpc: str = "127.0.0.1:50051"
    admin: str = "127.0.0.1:0"
    metrics: str = "127.0.0.1:9100"
    http: str | None = None  # None means no gateway in this process
    http_body: int = 2**20  # maximum bytes of an HTTP request body
    http_names: tuple[str, ...] = ()  # host names for a loopback listener without tokens
    http_origins: tuple[str, ...] = ()  # sites whose pages may call the gateway
    http_ignores_unknown: bool = False  # fields of bodies; otherwise they are rejected
    policy: str = "predicted"
    slo_ttft_s: float = 1.0  # the metrics count requests within both
    slo_itl_s: float = 0.1  # policy `predicted` also keeps to it where possible
    share_port: bool = False  # whether other routers listen on the same addresses
    colocated: bool = False  # decode workers compute all prompts; there are no prefill workers
    chunk: float = math.inf  # tokens that a decode worker computes per step
    rows: float = math.inf  # requests in a step of a decode worker
    prefill_chunk: float = math.inf  # likewise for prefill workers
    local_prefill: bool = False  # also with prefill workers connected, if it is predicted to be faster
    attempts: int = 3  # per request, when workers are lost
    queue_max_requests: int = 256
    queue_max_tokens: int = 1_000_000
    queue_max_wait_s: float = 10.0
    tenants: Mapping[str, float] = field(default_factory=dict)  # weights by name, 1 by default
    max_request_s: float = float(MAX_REQUEST_SECONDS)
    client_stall_s: float = 30.0
    worker_silence_s: float = 15.0  # a worker without a message for this long is lost; several heartbeats
    history: str | None = None  # a folder; see `baton.event_journal`
    tls: TlsConfig | None = None
    tokens: str | None = None  # a file; see `router.auth.tokens`
    receipt_key: str | None = None  # a file; see `baton.receipts.keys`
    resumable_s: float = 0.0  # default time that a stream continues without a router
    think_while_decoding: bool = False  # default for requests to a model that thinks
    scale: Mapping[Role, tuple[int, int]] = field(default_factory=lambda: dict.fromkeys(Role, (1, 4096)))  # of pools
    drain_s: float = 60.0
    traces: int = 512
    otlp: str | None = None  # export address http://host:port; None means no export
    trace_sample: float = 1.0  # exported share of traces, if the caller does not decide
    aliases: tuple[str, ...] = ()  # other names of the model that clients may use
    generation_defaults: bool = True  # whether generation_config.json sets the defaults of sampling
    tool_parser: str = "auto"  # a form of `router.parsing.model_forms`, or none
    reasoning_parser: str = "auto"


def _exporter(settings: RouterSettings) -> Exporter | None:
    if settings.otlp is None:
        return None
    try:
        from baton.tracing.otlp import Exporter
    except ModuleNotFoundError as error:
        text = f"{error.name} is not installed: pip install 'baton-serve[otel]', or leave tracing.otlp out"
        raise ConfigError(f"tracing.otlp: {text}") from error
    return Exporter(settings.otlp, settings.name, settings.version)


@dataclass(frozen=True, slots=True)
class RouterContext:
    """The parts of a router, each complete. Parts with state of their own: the workers, the queue, the requests."""

    settings: RouterSettings
    wire: Wire
    tokens: TokenFile | None
    pool: WorkerPool
    admission: PromisingAdmission
    dispatch: Dispatch
    running: RunningRequests
    sinks: Sinks
    exporter: Exporter | None
    issuer: Issuer | None  # of receipts; None without a key


def build_context(
    settings: RouterSettings,
    workers: WorkerSource,
    clock: Clock,
    prefixes: PrefixIndex | None = None,
    streams: StreamSource | None = None,
    tokenizer: str = "",
) -> RouterContext:
    """Build the parts of a router; see `serve`. Raises ConfigError for unusable files or a missing exporter."""

    async def no_streams(name: str) -> None:
        """Find no stream, because there is no ledger."""

    wire = Wire.of(settings.tls)
    tokens = TokenFile(settings.tokens) if settings.tokens else None
    issuer = Issuer(ReceiptKey.read(settings.receipt_key), settings.model) if settings.receipt_key else None
    router_id = f"router-{secrets.token_hex(4)}"
    history = History.open(settings.history, clock, "router", router_id)
    metrics = Metrics(settings.name, settings.version, settings.model)
    alone, local, colocated = ALONE[settings.policy], settings.local_prefill, settings.colocated
    options = PoolOptions(
        alone, settings.chunk, local, colocated, settings.slo_itl_s, settings.rows, metrics.ttft_predicted, tokenizer
    )
    policy, silence_s = POLICIES[settings.policy], settings.worker_silence_s
    pool = WorkerPool(workers, policy, router_id, silence_s, clock, wire, prefixes=prefixes, options=options)
    promises = Promises(pool.outlook, pool.place, pool.seats_of, clock, settings.prefill_chunk)
    admission = PromisingAdmission(
        promises,
        Placement.release,
        pool.can_serve,
        clock,
        QueueLimits(settings.queue_max_requests, settings.queue_max_tokens, settings.queue_max_wait_s),
        settings.tenants,
        capability_of=attrgetter("capability"),
        why_not=pool.reasons_not_to_serve,
    )
    pool.on_change, admission.starting = admission.changed, lambda: pool.starting
    metrics.watch_blocks(pool.blocks)
    metrics.watch_channels(pool.channels)
    metrics.watch_verifying(pool.loads)
    metrics.watch_promises(promises.outcomes, promises.margins.bins)
    metrics.watch_queue(lambda: admission.queued, lambda: admission.queued_tokens)
    exporter = _exporter(settings)
    traces = Traces(settings.traces, settings.trace_sample, clock, exporter.put if exporter else None)
    slo = settings.slo_ttft_s, settings.slo_itl_s
    sinks = Sinks(router_id, clock, history, metrics, ActivityRecorder(clock), traces, *slo, promises)
    dispatch = Dispatch(admission, pool, streams or no_streams, clock, settings.attempts)
    running = RunningRequests()
    return RouterContext(settings, wire, tokens, pool, admission, dispatch, running, sinks, exporter, issuer)
