"""Every cap on external input; docs/reference/limits.md lists them, with the reaction beyond each. Ranges of numbers,
such as a temperature, are in `baton.core`; the limits of a tenant's token are in the token file.
"""

from __future__ import annotations

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
MAX_BAD_WORDS = 256
MAX_LOGPROBS = 20
MAX_PROMPT_SCORES = 1_000_000  # of one request: over HTTP about 60 bytes each in the answer, more in memory
MAX_PRIORITY = 100
MAX_PROMISE_MS = 3_600_000  # limits of latency that a request may ask for, in milliseconds
MAX_RESUMABLE_S = 600
MAX_REQUEST_SECONDS = 3600  # from arrival to the end; a shorter deadline of the client counts
MAX_RECORD_BYTES = 2**20  # per stream, for events (about 20,000 tokens without logprobs) and again for thoughts
MAX_OPENED_TOKENS = 65_536  # of a receipt's opening: about 20 bytes each, and a client takes 4 MiB
MAX_SHOWN_MODEL_CHARS = 128
MAX_CHAT_BYTES = 1_000_000
MAX_CHAT_MESSAGES = 10_000
MAX_ROLE_CHARS = 64
MAX_TEMPLATE_CHARS = 262_144
MAX_RENDERED_CHARS = 1_000_000
MAX_SCHEMA_BYTES = 65_536
MAX_REGEX_BYTES = 8_192
MAX_GRAMMAR_BYTES = 65_536
MAX_GRAMMAR_OPERATORS = 8
MAX_GRAMMAR_PARTS = 2000  # bounds a parser state: each may be optional, and the time rises with the square
MAX_GRAMMAR_RULES = 256  # of GBNF; the time to convert it rises with their square
MAX_SCHEMA_MULTIPLE = 10_000
MAX_SCHEMA_PATTERNS = 8
MAX_NAME_PATTERNS = 100  # of `patternProperties` of one object; 500 took 54 s
MAX_CHOICE_TEXTS = 256
MAX_CHOICE_CHARS = 1_024

MAX_CALLS_PER_CONNECTION = 16384  # of gRPC; further calls wait in the client. A gateway has one connection.
MAX_GRPC_CONNECTIONS = 8192  # of one listener, and at most an eighth of the process's open files
MAX_HANDSHAKE_SECONDS = 20
MAX_MESSAGE_SECONDS = 30  # of a call
MAX_IDLE_SECONDS = 600  # of a gRPC connection without calls; the client connects again at its next call
PUBLIC_RECEIVE_BYTES = 4 * 2**20  # Bytes of one message from the public network.
INTERNAL_RECEIVE_BYTES = 64 * 2**20  # A prompt of a million tokens, or one step's tokens of a full worker
SEND_BYTES = 64 * 2**20  # the receiver's limit decides

MAX_READ_AT_ONCE = 256  # the default length of a queue
MAX_READ_BYTES = 32 * 2**20  # eight of the largest messages

# Trailers of a status have at most 8 KiB. Texts travel twice, and each non-ASCII byte takes three.
MAX_STATUS_MESSAGE_BYTES = 600
MAX_STATUS_VIOLATIONS = 8
MAX_VIOLATION_BYTES = 200

MAX_METRICS_REQUEST_BYTES = 8192
MAX_METRICS_CONNECTIONS = 64
MAX_METRICS_SECONDS = 5

MAX_HTTP_CONNECTIONS = 8192  # and at most half of the process's open files
MAX_HTTP_WAITING = 512  # requests that the router has not accepted yet, at least; see `http_waiting`
MAX_HTTP_HEADER_SECONDS = 20
MAX_HTTP_BODY_SECONDS = 30
MAX_HTTP_HEADER_BYTES = 16 * 2**10
MAX_HTTP_PROMPTS = 128
MAX_HTTP_COUNTS = 1024  # numbers of an event's id, which comes back in a header
MAX_HTTP_TOOLS = 128  # of a chat, over gRPC too
MAX_UNREAD_CHARS = 65_536
MAX_HTTP_NAME_CHARS = 256  # of a message, over gRPC too

MAX_KEPT_CALLS = 1024  # complete calls whose streams decode workers keep for their callers

MAX_WATCHERS = 16
MAX_SHOWN_REQUESTS = 200

MAX_TEMPLATE_SECONDS = 2
MAX_TEMPLATE_PRODUCT = 1_000_000

MIN_TOKEN_CHARS = 16
MAX_TOKEN_CHARS = 1024
MAX_TOKENS_FILE_BYTES = 4 * 2**20

MAX_GGUF_ENTRIES = 4_194_304  # of all arrays in a file; each takes 8 bytes or more. Vocabularies have about 300,000.
MAX_GGUF_FLOATS = 65_536  # of a tensor that goes into config.json


def http_waiting(queued: int) -> int:
    """Return how many HTTP requests may wait, for a queue of `queued` requests. All that the router lets wait fit in,
    because this count does not see tenants: the queue with an eighth for tenants below their share, the lane of
    promises, requests aside, and some that are still parsed.
    """
    return max(MAX_HTTP_WAITING, 4 * queued)
