"""Every cap on external input, in one table. A test keeps `docs/limits.md` equal to it. Ranges of numbers, such as a
temperature, are in `baton.core`; the limits of a tenant's token are in the token file.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_TEXT_CHARS = 1_000_000
MAX_PROMPT_IDS = 1_000_000
MAX_DETOKENIZE_IDS = 1_000_000
MAX_CLIENT_TAG_CHARS = 128
MAX_IDEMPOTENCY_KEY_CHARS = 128
MAX_SYSTEM_FINGERPRINT_CHARS = 128
MAX_CHOICES = 16
MAX_CACHE_SCOPE_CHARS = 256
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_PRIORITY = 100
MAX_RESUMABLE_S = 600
MAX_SHOWN_MODEL_CHARS = 128
MAX_CHAT_BYTES = 1_000_000
MAX_CHAT_MESSAGES = 10_000
MAX_ROLE_CHARS = 64
MAX_TEMPLATE_CHARS = 262_144
MAX_RENDERED_CHARS = 1_000_000
MAX_SCHEMA_BYTES = 65_536
MAX_REGEX_BYTES = 8_192
MAX_SCHEMA_MULTIPLE = 10_000
MAX_SCHEMA_PATTERNS = 8
MAX_CHOICE_TEXTS = 256
MAX_CHOICE_CHARS = 1_024

PUBLIC_RECEIVE_BYTES = 4 * 2**20  # Bytes of one message from the public network.
INTERNAL_RECEIVE_BYTES = 64 * 2**20  # A prompt of a million tokens, or one step's tokens of a full worker
SEND_BYTES = 64 * 2**20  # the receiver's limit decides

MAX_READ_AT_ONCE = 256  # the default length of a queue
MAX_READ_BYTES = 32 * 2**20  # eight of the largest messages

MAX_STATUS_MESSAGE_BYTES = 600
MAX_STATUS_VIOLATIONS = 8
MAX_VIOLATION_BYTES = 200

MAX_METRICS_REQUEST_BYTES = 8192

MAX_HTTP_HEADER_BYTES = 16 * 2**10
MAX_HTTP_PROMPTS = 128
MAX_HTTP_TOOLS = 128

MAX_WATCHERS = 16
MAX_SHOWN_REQUESTS = 200

MAX_TEMPLATE_SECONDS = 2
MAX_TEMPLATE_PRODUCT = 1_000_000

MIN_TOKEN_CHARS = 16
MAX_TOKEN_CHARS = 1024
MAX_TOKENS_FILE_BYTES = 4 * 2**20


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
    Cap("`text` of Generate and Tokenize", MAX_TEXT_CHARS, "characters", _REFUSED),
    Cap("`token_ids`", MAX_PROMPT_IDS, "tokens", _REFUSED),
    Cap("`ids` of Detokenize", MAX_DETOKENIZE_IDS, "tokens", _REFUSED),
    Cap("`client_tag`", MAX_CLIENT_TAG_CHARS, "characters", _REFUSED),
    Cap("`idempotency_key`", MAX_IDEMPOTENCY_KEY_CHARS, "characters", _REFUSED),
    Cap("`system_fingerprint` of Resume", MAX_SYSTEM_FINGERPRINT_CHARS, "characters", _REFUSED),
    Cap("`n`", MAX_CHOICES, "choices", _REFUSED),
    Cap("`cache_scope`", MAX_CACHE_SCOPE_CHARS, "characters", _REFUSED),
    Cap("`sampling.stop`", MAX_STOP_STRINGS, "strings", _REFUSED),
    Cap("each string in `sampling.stop`", MAX_STOP_CHARS, "characters", _REFUSED),
    Cap("`sampling.stop_token_ids`", MAX_STOP_TOKEN_IDS, "ids", _REFUSED),
    Cap("`sampling.logit_bias`", MAX_LOGIT_BIAS, "entries", _REFUSED),
    Cap("`sampling.logprobs`", MAX_LOGPROBS, "tokens per position", _REFUSED),
    Cap("`priority`, above and below 0", MAX_PRIORITY, "", _REFUSED),
    Cap("`resumable_s`", MAX_RESUMABLE_S, "seconds", _REFUSED),
    Cap("`chat`", MAX_CHAT_BYTES, "bytes", _REFUSED),
    Cap("`chat.messages`", MAX_CHAT_MESSAGES, "messages", _REFUSED),
    Cap("`role` of a chat message", MAX_ROLE_CHARS, "characters", _REFUSED),
    Cap("output of a chat template", MAX_RENDERED_CHARS, "characters", _REFUSED),
    Cap("a chat template", MAX_TEMPLATE_CHARS, "characters", "`chat` is rejected with this reason"),
    Cap("run time of a chat template", MAX_TEMPLATE_SECONDS, "seconds", _REFUSED),
    Cap("result of a multiplication in a chat template", MAX_TEMPLATE_PRODUCT, "characters or items", _REFUSED),
    Cap("`constraint.json_schema`", MAX_SCHEMA_BYTES, "bytes", _REFUSED),
    Cap("least common multiple of a schema's `multipleOf`", MAX_SCHEMA_MULTIPLE, "units of the last place", _REFUSED),
    Cap("`pattern` and `format` of a schema for one string", MAX_SCHEMA_PATTERNS, "in total", _REFUSED),
    Cap("`constraint.regex`", MAX_REGEX_BYTES, "bytes", _REFUSED),
    Cap("`constraint.choices`", MAX_CHOICE_TEXTS, "texts", _REFUSED),
    Cap("each text in `constraint.choices`", MAX_CHOICE_CHARS, "characters", _REFUSED),
    Cap("a model's name in an error", MAX_SHOWN_MODEL_CHARS, "characters", "cut"),
    Cap("a message to the public listener, or to a client", PUBLIC_RECEIVE_BYTES, "bytes", _CLOSED),
    Cap("a message to a worker, to the admin listener or to the router", INTERNAL_RECEIVE_BYTES, "bytes", _CLOSED),
    Cap("a message that Baton sends", SEND_BYTES, "bytes", _CLOSED),
    Cap("requests that a router parses, tokenizes or compiles at the same time", MAX_READ_AT_ONCE, "requests", _LATER),
    Cap("total size of their messages", MAX_READ_BYTES, "bytes", _LATER),
    Cap("text of an error", MAX_STATUS_MESSAGE_BYTES, "bytes", "cut"),
    Cap("fields named in an error", MAX_STATUS_VIOLATIONS, "fields", "left out"),
    Cap("text for each named field", MAX_VIOLATION_BYTES, "bytes", "cut"),
    Cap("a request to the metrics listener", MAX_METRICS_REQUEST_BYTES, "bytes", "closed without an answer"),
    Cap("headers of an HTTP request", MAX_HTTP_HEADER_BYTES, "bytes", "431"),
    Cap("prompts of an HTTP request", MAX_HTTP_PROMPTS, "prompts", "400 naming the field"),
    Cap("`tools` of an HTTP request", MAX_HTTP_TOOLS, "tools", "400 naming the field"),
    Cap("watchers of a router, through `Admin.Watch` and `/live`", MAX_WATCHERS, "watchers", "RESOURCE_EXHAUSTED, 503"),
    Cap("requests in a message to a watcher", MAX_SHOWN_REQUESTS, "requests", "the newest are shown"),
    Cap("a token in the token file", MAX_TOKEN_CHARS, "characters", "the file is rejected"),
    Cap("the token file", MAX_TOKENS_FILE_BYTES, "bytes", "the file is rejected"),
)


def as_markdown() -> str:
    """Return the table of `docs/limits.md`."""
    rows = (f"| {cap.what} | {cap.most:,} {cap.unit}".rstrip() + f" | {cap.beyond} |" for cap in CAPS)
    return "\n".join(("| limited value | maximum | beyond the maximum |", "|---|---|---|", *rows)) + "\n"
