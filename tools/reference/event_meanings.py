"""The processes that log each event, and the meaning of the event."""

from __future__ import annotations

from collections.abc import Mapping

_ROUTER, _GATEWAY, _PREFILL, _DECODE, _BOTH = (
    "router",
    "router, gateway",
    "prefill worker",
    "decode worker",
    "both workers",
)
_ALL, _SUPERVISOR = "router, both workers", "supervisor"
_OPERATORS, _RAY = "supervisor, controller", "controller"

GROUPS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "requests": {
        "request_arrived": (_ROUTER, "a choice arrived; its client already has `known` tokens"),
        "request_attempted": (_ROUTER, "an attempt begins on these workers, named with their incarnations"),
        "request_accepted": (_ROUTER, "capacity is reserved, and the client receives `Accepted`; once per choice"),
        "request_first_token": (_ROUTER, "the first token arrived"),
        "promise_broken": (
            _ROUTER,
            "a promised latency was not kept; `outcome` is broken_ttft, broken_itl or broken_death, and `promised` has "
            "both limits",
        ),
        "request_handed_back": (
            _ROUTER,
            "the attempt ended early and another one follows; `reason` is preempted, no_room, kv_dropped, "
            "prefill_lost, decode_lost, or not_there (no worker has the stream to resume)",
        ),
        "request_finished": (
            _ROUTER,
            "the last token was sent; `timings` has the seconds of each stage, "
            "`placement` the workers, bytes and transport",
        ),
        "request_cancelled": (_ROUTER, "the client, a Cancel call, or a resuming router ended it"),
        "request_refused": (
            _ROUTER,
            "rejected before it was accepted: it is invalid, or capacity was not free in time",
        ),
        "request_failed": (_ROUTER, "ended with an error after it was accepted, or because of a fault"),
        "request_broke": (_ROUTER, "a bug, with its traceback"),
        "not_looked_for": (_ROUTER, "a Resume call could not look up whether a worker still holds the stream"),
        "gateway_client_stalled": (_GATEWAY, "an HTTP client reads too slowly and is disconnected"),
        "gateway_call_broke": (_GATEWAY, "a bug in the gateway, with its traceback"),
    },
    "handoffs": {
        "handoff_reserved": (_DECODE, "blocks for its KV are reserved; `cached` tokens were in the prefix cache"),
        "handoff_prefill": (_PREFILL, "the prompt is queued for prefill"),
        "handoff_computes": (_DECODE, "the decode worker computes the prompt itself"),
        "handoff_offered": (_DECODE, "a prefill worker offers the KV and begins to send"),
        "handoff_pushed": (_PREFILL, "the decode worker has received everything and has committed"),
        "handoff_committed": (_DECODE, "all KV has arrived, and this worker owns the request"),
        "handoff_repush": (_PREFILL, "the KV `held` from that attempt is sent to another decode worker"),
        "handoff_finished": (_DECODE, "all tokens were sent"),
        "handoff_preempted": (_DECODE, "the block pool is full, and the request is requeued"),
        "handoff_released": (_DECODE, "the router released the attempt"),
        "handoff_fenced": (_DECODE, "no commit of the attempt is accepted from now on"),
        "handoff_aborted": (_PREFILL, "the attempt was aborted by its router, lost its router, or was late"),
        "handoff_failed": (
            _BOTH,
            "the push or its takeover failed; `held` means that the KV is kept for another attempt",
        ),
        "handoff_parked": (
            _DECODE,
            "its router was lost; decoding continues until a Resume call or the end of `resumable_s`",
        ),
        "handoff_parked_in_vain": (_DECODE, "no router resumed it within `resumable_s`"),
        "push_refused": (_PREFILL, "the push could not begin"),
        "fetch_refused": (_DECODE, "KV that a prefill worker requested could not be sent"),
        "move_refused": (_DECODE, "KV of a running sequence could not be sent to another decode worker"),
        "command_refused": (_BOTH, "a router sent an invalid command"),
    },
    "channels": {
        "channel_opened": (_BOTH, "a data channel opened after `ms`, with the throughput that its probe measured"),
        "channel_closed": (_BOTH, "a data channel closed, at either end"),
        "channel_refused": (_BOTH, "the peer that requested a channel is incompatible"),
        "channel_failed": (_BOTH, "a bug, with its traceback"),
        "channel_stream_failed": (_BOTH, "a bug in the reader of replies, with its traceback"),
        "push_report_failed": (_BOTH, "a bug in the report of a push's end, with its traceback"),
        "gpu_memory_kept": (_BOTH, "a reader did not close a KV pool, so its memory is kept until this process ends"),
        "transport_failed": (_BOTH, "this transport could not be opened to this worker, so the next one is tried"),
        "transport_left_out": (_BOTH, "this transport does not work on this host"),
    },
    "workers": {
        "process_started": (_ALL, "the whole config of the process, without secrets; `gpus` is CUDA_VISIBLE_DEVICES"),
        "model_loading": (_BOTH, "progress, every few seconds"),
        "model_loaded": (_BOTH, "the model is in memory; `dtype`: of the KV; `backend`: native, or transformers X"),
        "old_cache_in_use": (_BOTH, "after a change of role the old KV cache is not freed; its memory stays in use"),
        "prefix_fetch_off": (_PREFILL, "prefixes are computed, and not fetched from decode workers"),
        "model_loads_anew": (_BOTH, "the new role needs other weights"),
        "worker_ready": (_BOTH, "the worker is registered and serves"),
        "router_joined": (_BOTH, "a router opened its stream"),
        "router_gone": (_BOTH, "a router closed its stream in order"),
        "router_lost": (_BOTH, "the stream of a router broke"),
        "router_unreadable": (_BOTH, "a bug in the reader of a router's stream, with its traceback"),
        "worker_ordered": (_BOTH, "the controller requests a drain (`drain`) or a role change (`role`)"),
        "worker_stops": (_BOTH, "this incarnation ends"),
        "worker_failed": (_BOTH, "the error that ended the worker (in Ray)"),
        "lease_lost": (
            _BOTH,
            "another incarnation has its place, or the process was frozen for too long; the worker ends",
        ),
        "drafter_failed": (_BOTH, "a bug in the proposals of speculation, with its traceback; none are made any more"),
        "engine_step_failed": (_BOTH, "a bug in a step, with its traceback; the requests of the step fail"),
        "engine_thread_failed": (_BOTH, "a bug that ends the worker, with its traceback"),
        "orders_unread": (_BOTH, "the controller's commands could not be read from Redis"),
    },
    "fleet": {
        "worker_connected": (_ROUTER, "the stream to a worker is open"),
        "worker_lost": (_ROUTER, "the stream to a worker broke"),
        "worker_unreachable": (_ROUTER, "no stream could be opened, again"),
        "worker_dropped": (_ROUTER, "the worker has had no lease for `absent_s`"),
        "worker_does_not_fit": (_ROUTER, "the worker is incompatible with the others"),
        "decision": (
            _OPERATORS,
            "a decision of the controller; `kind` is plan, start, turn, drain, end, replace or give_up; "
            "the last two are warnings",
        ),
        "drain_wished": (_ROUTER, "an operator requested a drain of the worker"),
        "plan_said": (_ROUTER, "an operator set the sizes of the pools"),
        "process_log_lost": (_SUPERVISOR, "a process is started again without a log, because its file is not writable"),
        "process_died": (_SUPERVISOR, "a process died and is started again"),
        "process_not_started": (_SUPERVISOR, "the operating system did not start the process"),
        "process_silent": (_SUPERVISOR, "the process was not ready in time and is replaced"),
        "actor_does_not_answer": (_OPERATORS, "the Ray actor of a worker does not answer"),
        "actor_not_ended": (_OPERATORS, "the Ray actor of a worker could not be ended"),
    },
    "routers": {
        "router_started": (_ROUTER, "the router serves at these addresses"),
        "router_told": (_ROUTER, "the addresses that other processes use"),
        "router_stopped": (_ROUTER, "the router has stopped"),
        "gateway_started": ("gateway", "the gateway serves `http` in front of `target`"),
        "tokens_read": (_ROUTER, "the token file was read again"),
        "traces_not_exported": (
            _ROUTER,
            "a batch of traces did not reach the collector; `dropped` requests since the start",
        ),
        "trace_broke": (_ROUTER, "a bug in the exporter, with its traceback; a batch of traces is lost"),
        "tokens_not_read": (_ROUTER, "the token file is invalid; the `kept` earlier tokens stay valid"),
        "chat_template_unusable": (_ROUTER, "chats are rejected, because the model's chat template is invalid"),
        "generation_defaults": (_ROUTER, "the model's generation_config.json sets these defaults of sampling"),
    },
    "controller": {
        "control_without_redis": (
            _OPERATORS,
            "the control state could not be read or written; the next poll tries again",
        ),
        "controller_without_redis": (_RAY, "the controller cannot reach Redis and tries again"),
        "controller_failed": (_RAY, "a bug, with its traceback; Ray starts the controller again"),
        "controller_did_not_stop": (_SUPERVISOR, "the controller did not stop in time"),
        "cluster_already_serves": (_SUPERVISOR, "`baton up` attaches to a running cluster in Ray, with `workers`"),
        "cluster_left_running": (_SUPERVISOR, "`baton up` ended before it was ready; the cluster served before it"),
        "worker_did_not_start": (_SUPERVISOR, "a worker of the running cluster does not start, for `error`"),
        "ray_not_started": ("supervisor", "a local Ray did not start; it is started again, up to `attempts` times"),
        "ray_does_not_answer": (_OPERATORS, "Ray does not answer"),
        "ray_did_not_stop_its_actors": (_SUPERVISOR, "Ray did not end its actors in time"),
        "redis_died": (_SUPERVISOR, "the embedded Redis died and is started again"),
        "redis_not_back": (_SUPERVISOR, "the restarted Redis was not ready in time"),
        "demand_not_told": (_ROUTER, "the autoscaler does not receive the queue of this router"),
        "board_unreadable": (_ROUTER, "the controller's state could not be read from Redis"),
        "board_row_refused": ("router, controller", "a row of the control state is invalid"),
    },
    "ledger": {
        "ledger_unreachable": (_ROUTER, "Redis is unreachable; the known workers stay in use"),
        "ledger_away": (_BOTH, "the lease could not be renewed; streams continue"),
        "ledger_forgot": (_BOTH, "Redis came back empty, and the next epoch begins"),
        "ledger_record_refused": (_ROUTER, "the record of a worker is invalid"),
        "ledger_writer_waits": (_BOTH, "`left` writes wait for Redis"),
        "ledger_writer_closed": (_BOTH, "the writer closed with unwritten entries"),
        "ledger_writer_failed": (_BOTH, "a bug, with its traceback"),
        "mint_waits": (_BOTH, "a new incarnation waits until an old lease has expired"),
        "ownership_write_refused": (_DECODE, "a newer owner has the record"),
        "ownership_key_foreign": (_DECODE, "the value at the key is not an ownership record"),
        "ownership_record_damaged": (_ROUTER, "the record is invalid and is ignored"),
        "directory_damaged": (_ROUTER, "the list of cached prefixes of a worker is invalid"),
        "directory_away": (_ROUTER, "Redis is unreachable, and cached prefixes are not looked up"),
        "history_lost": (_ALL, "the history file could not be written and is closed"),
    },
    "kernels": {
        "kernels_torch": (_BOTH, "the kernels of torch are in use, because no faster ones work here"),
        "attention_splits_without_effect": (_BOTH, "these kernels have no attention splits"),
        "profile_not_used": (
            _BOTH,
            "profiles of this machine are for another dtype, level, weight format or thread count",
        ),
        "profile_unreadable": (_BOTH, "the file of `baton profile` is invalid"),
        "profile_unwritable": (_BOTH, "a measured dtype could not be kept, so the next start measures again"),
        "verify_passes": (_BOTH, "the shapes of verify passes"),
        "weights_widened": (_BOTH, "these kinds of quantised layers are kept in the model's dtype"),
        "fallback_checked": (_BOTH, "over Baton's KV, a model in transformers gives the logits of transformers"),
        "fixed_forwards_checked": (_BOTH, "the results of a fixed shape do not depend on the other sequences"),
        "speculation_off": (_DECODE, "`decode.speculation: auto` makes no proposals here, for this reason"),
        "speculation_on": (
            _DECODE,
            "decode steps may have proposals, up to so many `rows` in total",
        ),
        "speculation_rounds": (
            _DECODE,
            "larger steps round differently here, so proposals may change the last bits",
        ),
        "fixed_forwards_vary": (_BOTH, "they do depend on them, so this worker accepts no deterministic requests"),
        "decode_steps_vary": (
            _BOTH,
            "decode steps are not reproducible, so each token of a deterministic request is verified",
        ),
        "decode_graphs_captured": (_DECODE, "CUDA graphs are captured"),
        "decode_graphs_unavailable": (_DECODE, "decode runs without CUDA graphs"),
        "kernels_warmed": (_BOTH, "the kernels of a GPU are compiled for all shapes of steps"),
    },
    "any": {
        "log_lines_lost": ("any", "so many log lines could not be written, for example because the disk was full"),
        "process_failed": ("any", "an exception ended the process, with its traceback"),
        "thread_failed": ("any", "an exception ended a thread, with its traceback"),
    },
}

_END = ("error", "reason", "stage")
# The router logs the four ends of a request with one call: level of each, and keys passed as `**facts`.
LEVEL = {
    "request_finished": "info",
    "request_cancelled": "info",
    "request_refused": "info",
    "request_failed": "warning",
}
_LISTENERS = ("admin", "grpc", "http", "metrics")
MORE_KEYS: Mapping[str, tuple[str, ...]] = {
    "channel_opened": ("channel", "ms", "transport", "worker"),
    "fixed_forwards_checked": ("everywhere", "exact_rows", "ragged", "rows", "tokens"),
    "router_started": _LISTENERS,
    "router_told": _LISTENERS,
    "request_finished": ("placement", "tenant", "timings", "trace_id", "usage"),
    "request_cancelled": _END,
    "request_refused": _END,
    "request_failed": _END,
}
