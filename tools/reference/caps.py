"""Part of docs/reference/limits.md: each cap of `baton.limits`, with the reaction beyond it."""

from __future__ import annotations

from dataclasses import dataclass

from baton import limits
from tools.reference.pages import Page, table


@dataclass(frozen=True, slots=True)
class Cap:
    """One row: the limited thing, its limit, and the reaction beyond it."""

    what: str
    most: int
    unit: str
    beyond: str


_REFUSED = "INVALID_ARGUMENT naming the field"
_LATER = "RESOURCE_EXHAUSTED with RetryInfo; requests below 4,097 bytes without a constraint are not counted"
_CLOSED = "gRPC rejects the message"
CAPS: tuple[Cap, ...] = (
    Cap("`text` of Generate and Tokenize", limits.MAX_TEXT_CHARS, "characters", _REFUSED),
    Cap("`token_ids`", limits.MAX_PROMPT_IDS, "tokens", _REFUSED),
    Cap("`ids` of Detokenize", limits.MAX_DETOKENIZE_IDS, "tokens", _REFUSED),
    Cap("`client_tag`", limits.MAX_CLIENT_TAG_CHARS, "characters", _REFUSED),
    Cap("`idempotency_key`", limits.MAX_IDEMPOTENCY_KEY_CHARS, "characters", _REFUSED),
    Cap("`system_fingerprint` of Resume", limits.MAX_SYSTEM_FINGERPRINT_CHARS, "characters", _REFUSED),
    Cap("`n`", limits.MAX_CHOICES, "choices", _REFUSED),
    Cap("`cache_scope`", limits.MAX_CACHE_SCOPE_CHARS, "characters", _REFUSED),
    Cap("`sampling.stop`", limits.MAX_STOP_STRINGS, "strings", _REFUSED),
    Cap("each string in `sampling.stop`", limits.MAX_STOP_CHARS, "characters", _REFUSED),
    Cap("`sampling.stop_token_ids`", limits.MAX_STOP_TOKEN_IDS, "ids", _REFUSED),
    Cap("`sampling.logit_bias`", limits.MAX_LOGIT_BIAS, "entries", _REFUSED),
    Cap("`sampling.bad_words`", limits.MAX_BAD_WORDS, "texts", _REFUSED),
    Cap("`sampling.logprobs`, `prompt_logprobs`", limits.MAX_LOGPROBS, "tokens per position", _REFUSED),
    Cap(
        "log-probabilities of prompts in an answer",
        limits.MAX_PROMPT_SCORES,
        "entries: prompt tokens times alternatives + 1, over HTTP times `n`",
        _REFUSED,
    ),
    Cap("`priority`, above and below 0", limits.MAX_PRIORITY, "", _REFUSED),
    Cap("`ttft_ms`, `itl_ms`", limits.MAX_PROMISE_MS, "milliseconds", _REFUSED),
    Cap("`resumable_s`", limits.MAX_RESUMABLE_S, "seconds", _REFUSED),
    Cap(
        "record of a stream on its decode worker",
        limits.MAX_RECORD_BYTES,
        "bytes, about 20,000 tokens without logprobs",
        "the oldest tokens are left out, and events over HTTP have no ids",
    ),
    Cap(
        "opening of a receipt",
        limits.MAX_OPENED_TOKENS,
        "tokens of all choices",
        "the receipt has no `opening.choices`",
    ),
    Cap("`chat`", limits.MAX_CHAT_BYTES, "bytes", _REFUSED),
    Cap("`chat.messages`", limits.MAX_CHAT_MESSAGES, "messages", _REFUSED),
    Cap("`role` of a chat message", limits.MAX_ROLE_CHARS, "characters", _REFUSED),
    Cap("output of a chat template", limits.MAX_RENDERED_CHARS, "characters", _REFUSED),
    Cap("a chat template", limits.MAX_TEMPLATE_CHARS, "characters", "`chat` is rejected with this reason"),
    Cap("run time of a chat template", limits.MAX_TEMPLATE_SECONDS, "seconds", _REFUSED),
    Cap("result of a multiplication in a chat template", limits.MAX_TEMPLATE_PRODUCT, "characters or items", _REFUSED),
    Cap("`constraint.json_schema`", limits.MAX_SCHEMA_BYTES, "bytes", _REFUSED),
    Cap(
        "least common multiple of a schema's `multipleOf`",
        limits.MAX_SCHEMA_MULTIPLE,
        "units of the last place",
        _REFUSED,
    ),
    Cap("`pattern` and `format` of a schema for one string", limits.MAX_SCHEMA_PATTERNS, "in total", _REFUSED),
    Cap("`patternProperties` of a schema", limits.MAX_NAME_PATTERNS, "of one object", _REFUSED),
    Cap("`constraint.regex`", limits.MAX_REGEX_BYTES, "bytes", _REFUSED),
    Cap("`constraint.grammar`", limits.MAX_GRAMMAR_BYTES, "bytes", _REFUSED),
    Cap("`constraint.grammar`, characters `&` and `~`", limits.MAX_GRAMMAR_OPERATORS, "", _REFUSED),
    Cap(
        "`constraint.grammar`, without texts: names, expressions, numbers and operators",
        limits.MAX_GRAMMAR_PARTS,
        "",
        _REFUSED,
    ),
    Cap("`constraint.grammar` in GBNF", limits.MAX_GRAMMAR_RULES, "rules", _REFUSED),
    Cap("`constraint.choices`", limits.MAX_CHOICE_TEXTS, "texts", _REFUSED),
    Cap("each text in `constraint.choices`", limits.MAX_CHOICE_CHARS, "characters", _REFUSED),
    Cap("a model's name in an error", limits.MAX_SHOWN_MODEL_CHARS, "characters", "cut"),
    Cap("a message to the public listener, or to a client", limits.PUBLIC_RECEIVE_BYTES, "bytes", _CLOSED),
    Cap(
        "a message to a worker, to the admin listener or to the router", limits.INTERNAL_RECEIVE_BYTES, "bytes", _CLOSED
    ),
    Cap("a message that Baton sends", limits.SEND_BYTES, "bytes", _CLOSED),
    Cap(
        "requests that a router parses, tokenizes or compiles at the same time",
        limits.MAX_READ_AT_ONCE,
        "requests",
        _LATER,
    ),
    Cap("total size of their messages", limits.MAX_READ_BYTES, "bytes", _LATER),
    Cap("text of an error", limits.MAX_STATUS_MESSAGE_BYTES, "bytes", "cut"),
    Cap("fields named in an error", limits.MAX_STATUS_VIOLATIONS, "fields", "left out"),
    Cap("text for each named field", limits.MAX_VIOLATION_BYTES, "bytes", "cut"),
    Cap("a request to the metrics listener", limits.MAX_METRICS_REQUEST_BYTES, "bytes", "closed without an answer"),
    Cap("open connections of a metrics listener", limits.MAX_METRICS_CONNECTIONS, "connections", "closed immediately"),
    Cap(
        "time for a request to the metrics listener and for reading the answer",
        limits.MAX_METRICS_SECONDS,
        "seconds",
        "reset, and the rest of the answer is dropped",
    ),
    Cap(
        "open connections of a gRPC listener",
        limits.MAX_GRPC_CONNECTIONS,
        "connections, but at most an eighth of the process's open files",
        "closed immediately; the client reports UNAVAILABLE and retries",
    ),
    Cap("time for the handshake of a gRPC connection, TLS included", limits.MAX_HANDSHAKE_SECONDS, "seconds", "closed"),
    Cap(
        "time without calls on a gRPC connection",
        limits.MAX_IDLE_SECONDS,
        "seconds",
        "closed; the client connects again at its next call",
    ),
    Cap("time for the message of a gRPC call", limits.MAX_MESSAGE_SECONDS, "seconds", "DEADLINE_EXCEEDED"),
    Cap(
        "calls on one gRPC connection",
        limits.MAX_CALLS_PER_CONNECTION,
        "calls",
        "gRPC delays them in the client until others have ended",
    ),
    Cap(
        "open HTTP connections",
        limits.MAX_HTTP_CONNECTIONS,
        "connections, but at most half of the process's open files",
        "503 with Retry-After, then closed",
    ),
    Cap(
        "HTTP requests that the router has not accepted yet",
        limits.MAX_HTTP_WAITING,
        "requests, or four times `router.queue.max_requests` if that is more",
        "503 with Retry-After",
    ),
    Cap(
        "time of a request, if its client has no shorter deadline",
        limits.MAX_REQUEST_SECONDS,
        "seconds",
        "DEADLINE_EXCEEDED, 504",
    ),
    Cap("time for the headers of an HTTP request", limits.MAX_HTTP_HEADER_SECONDS, "seconds", "408, then closed"),
    Cap("time for the body of an HTTP request", limits.MAX_HTTP_BODY_SECONDS, "seconds", "408, then closed"),
    Cap("time for a TLS handshake of an HTTP connection", limits.MAX_HTTP_HEADER_SECONDS, "seconds", "closed"),
    Cap("headers of an HTTP request", limits.MAX_HTTP_HEADER_BYTES, "bytes", "431"),
    Cap("prompts of an HTTP request", limits.MAX_HTTP_PROMPTS, "prompts", "400 naming the field"),
    Cap("numbers in the `id` of an event", limits.MAX_HTTP_COUNTS, "numbers", "events have no `id`"),
    Cap("`tools` of a conversation", limits.MAX_HTTP_TOOLS, "tools", _REFUSED),
    Cap("`messages[].name` of a conversation", limits.MAX_HTTP_NAME_CHARS, "characters", _REFUSED),
    Cap(
        "text of an answer that is read as tool calls and contains none",
        limits.MAX_UNREAD_CHARS,
        "characters",
        "later marks of calls are text",
    ),
    Cap(
        "complete parts of unfinished HTTP answers, for a router",
        limits.MAX_KEPT_CALLS,
        "parts",
        "further ones cannot be resumed",
    ),
    Cap(
        "watchers of a router, through `Admin.Watch` and `/live`",
        limits.MAX_WATCHERS,
        "watchers",
        "RESOURCE_EXHAUSTED, 503",
    ),
    Cap("requests in a message to a watcher", limits.MAX_SHOWN_REQUESTS, "requests", "the newest are shown"),
    Cap("a token in the token file", limits.MAX_TOKEN_CHARS, "characters", "the file is rejected"),
    Cap("the token file", limits.MAX_TOKENS_FILE_BYTES, "bytes", "the file is rejected"),
    Cap(
        "arrays in the metadata of a GGUF file, all together",
        limits.MAX_GGUF_ENTRIES,
        "entries",
        "the file is rejected",
    ),
    Cap("factors of rotations in a GGUF file", limits.MAX_GGUF_FLOATS, "numbers", "the file is rejected"),
)


def page() -> Page:
    """Return the page of limits."""
    rows = ((cap.what, f"{cap.most:,} {cap.unit}", cap.beyond) for cap in CAPS)
    return Page("limits.md", {"limits": table(("limited value", "maximum", "beyond the maximum"), rows)})
