"""The token file, each token with its tenant, role and limits, and the enforcement of these limits.

    tokens:
      - token_sha256: 9b74c9897bac770ffc029102a200c5de...   # or `token: ...` itself, in a file that only Baton can read
        tenant: research
        role: user                                          # or admin; user is the default
        limits: {max_concurrent: 8, max_tokens: 1024, max_prompt_tokens: 16384, priority_max: 0}

Only the SHA-256 of a token is kept; the token is never shown or logged. The file is read again when it changes. A
broken file leaves the old tokens in force.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import hmac
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import structlog
import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, SecretStr, ValidationError, model_validator

from baton.config.loading import NO_VALUE
from baton.core import SequenceSpec
from baton.errors import ConfigError, InvalidRequest, RateLimited, Unauthenticated, Violation
from baton.limits import MAX_PRIORITY, MAX_TOKEN_CHARS, MAX_TOKENS_FILE_BYTES, MIN_TOKEN_CHARS
from baton.rpc.v1 import inference_pb2 as pb


class Right(enum.StrEnum):
    """Role of a token's owner."""

    USER = "user"
    ADMIN = "admin"


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class Limits(_Entry):
    """Limits of a token; None means no limit of its own."""

    max_concurrent: PositiveInt | None = None  # running and waiting requests
    max_tokens: PositiveInt | None = None  # new tokens per request
    max_prompt_tokens: PositiveInt | None = None
    priority_max: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None


class _TokenEntry(_Entry):
    token: SecretStr | None = None
    token_sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    tenant: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    role: Right = Right.USER
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _one_token(self) -> _TokenEntry:
        if (self.token is None) == (self.token_sha256 is None):
            raise ValueError("must have exactly one of token and token_sha256")
        text = self.token.get_secret_value() if self.token else "x" * MIN_TOKEN_CHARS
        if not (MIN_TOKEN_CHARS <= len(text) <= MAX_TOKEN_CHARS and text.isascii() and text.isprintable()):
            raise ValueError(f"token: must be {MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS} printable ASCII characters")
        return self

    def digest(self) -> bytes:
        return _digest(self.token.get_secret_value()) if self.token else bytes.fromhex(self.token_sha256 or "")


class _File(_Entry):
    tokens: Annotated[list[_TokenEntry], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class Grant:
    """Rights of a token's owner. `key` identifies the token without revealing it."""

    tenant: str
    right: Right
    limits: Limits
    key: str


class Tokens:
    """Grants of a file. Raises ValueError if a token occurs twice."""

    def __init__(self, file: _File) -> None:
        self._by_digest: dict[bytes, Grant] = {}
        for number, entry in enumerate(file.tokens):
            digest = entry.digest()
            if digest in self._by_digest:
                raise ValueError(f"tokens.{number}: duplicate token")
            self._by_digest[digest] = Grant(entry.tenant, entry.role, entry.limits, digest.hex()[:16])
        self._by_key = {grant.key: grant for grant in self._by_digest.values()}

    def __contains__(self, grant: Grant) -> bool:
        return self._by_key.get(grant.key) == grant

    def __len__(self) -> int:
        return len(self._by_digest)

    def grant(self, authorization: str | None) -> Grant:
        """Return the grant for the header `Bearer TOKEN`, in constant time. Raises Unauthenticated."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("a token is required: send the header 'authorization: Bearer TOKEN'")
        given, found = _digest(token.strip()), None
        for digest, grant in self._by_digest.items():  # every entry, also after a match
            if hmac.compare_digest(given, digest):
                found = grant
        if found is None:
            raise Unauthenticated("unknown token")
        return found


def read_tokens(path: str | Path) -> Tokens:
    """Return a file's tokens. Raises ConfigError with the number of each wrong entry, without any value of it."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_TOKENS_FILE_BYTES + 1)
        if len(data) > MAX_TOKENS_FILE_BYTES:
            raise ValueError(f"must be at most {MAX_TOKENS_FILE_BYTES} bytes")
        return Tokens(_File.model_validate(_parse(data)))
    except OSError as error:
        problems = [f"cannot be read: {error.strerror}"]
    except ValidationError as error:
        problems = list(_problems(error.errors(include_input=False, include_url=False)))
    except ValueError as error:
        problems = [str(error)]
    raise ConfigError("\n".join(f"security.tokens: {path}: {problem}" for problem in problems))


def _parse(data: bytes) -> object:
    """Parse YAML (or JSON). Raises ValueError without the parser's text, because that may quote the file."""
    try:
        return yaml.safe_load(data.decode())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ValueError(f"line {line}: not YAML") from None
    except (yaml.YAMLError, *NO_VALUE, RecursionError):
        raise ValueError("not YAML") from None


def _problems(details: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for detail in details:
        loc, message = list(detail["loc"]), str(detail["msg"]).removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":  # the unknown key may be a token
            loc, message = loc[:-1], "has an unknown key"
        where = ".".join(map(str, loc)) or "the file"
        yield f"{where}: {message[0].lower()}{message[1:]}"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


log = structlog.get_logger(__name__)
LOOK_S = 2.0
_Version = tuple[int, int, int]


class TokenFile:
    """The tokens of a file; the last good version stays in force. Raises ConfigError if the first one is broken."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._version = self._look()  # before reading, so that a change in between is read again
        self._tokens: Tokens = read_tokens(path)

    def grant(self, authorization: str | None) -> Grant:
        return self._tokens.grant(authorization)

    def confirm(self, grant: Grant) -> None:
        """Raise Unauthenticated if the token was removed or its rights changed."""
        if grant not in self._tokens:
            raise Unauthenticated("the token was removed or its rights changed")

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.refresh()
            except Exception:  # a task boundary: without the watch, revoked tokens would stay valid
                log.exception("tokens_not_read", kept=len(self._tokens))

    async def refresh(self) -> None:
        """Read the file if it has changed. A broken version is logged once."""
        version = self._look()
        if version == self._version:
            return
        try:
            self._tokens = await asyncio.to_thread(read_tokens, self._path)
        except ConfigError as error:
            log.error("tokens_not_read", error=str(error), kept=len(self._tokens))
        else:
            log.info("tokens_read", tokens=len(self._tokens))
        self._version = version

    def _look(self) -> _Version | None:
        try:
            found = Path(self._path).stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


RETRY_S = 1.0


class Concurrency:
    """Running requests per token. A cancelled request no longer counts, so that its successor fits."""

    def __init__(self) -> None:
        self._running: dict[str, list[Callable[[], bool]]] = {}

    @contextmanager
    def one_more(self, grant: Grant | None, is_cancelled: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Count a request while it runs or waits. Raises RateLimited if it exceeds the limit."""
        if grant is None:
            yield
            return
        running, most = self._running.setdefault(grant.key, []), grant.limits.max_concurrent
        if most is not None and sum(not cancelled() for cancelled in running) >= most:
            raise RateLimited(f"this token allows at most {most} concurrent requests", RETRY_S)
        running.append(is_cancelled)
        try:
            yield
        finally:
            running.remove(is_cancelled)
            if not running:
                del self._running[grant.key]


def limited(spec: SequenceSpec, message: pb.GenerateRequest, grant: Grant | None) -> SequenceSpec:
    """Return the request within the limits of its token, in its tenant's cache scope. Raises InvalidRequest naming
    every field above a limit. Fields that the caller left unset are reduced to the limit.
    """
    if grant is None:
        return spec
    violations = list(_violations(spec, message, grant))
    if violations:
        raise InvalidRequest(*violations)
    limits, sampling = grant.limits, spec.sampling
    if limits.max_tokens is not None and (most := limits.max_tokens // max(message.n, 1)) < sampling.max_tokens:
        sampling = replace(sampling, max_tokens=most)
    priority = spec.priority if limits.priority_max is None else min(spec.priority, limits.priority_max)
    # A digest, because a long scope would not fit. No other tenant can name the scope.
    scope = hashlib.sha256(spec.cache_scope.encode()).hexdigest() if spec.cache_scope else ""
    return replace(spec, sampling=sampling, priority=priority, cache_scope=f"{grant.tenant}/{scope}")


def may_cancel(asking: Grant | None, owner: Grant | None) -> bool:
    """Return True if `asking` may cancel a request of `owner`: the same tenant, or an admin."""
    return asking is None or asking.right is Right.ADMIN or (owner is not None and owner.tenant == asking.tenant)


def _violations(spec: SequenceSpec, message: pb.GenerateRequest, grant: Grant) -> Iterator[Violation]:
    limits, field = grant.limits, message.WhichOneof("prompt") or "prompt"
    asked = spec.sampling.max_tokens * max(message.n, 1) if message.sampling.HasField("max_tokens") else None
    for name, most, got in (
        (field, limits.max_prompt_tokens, len(spec.prompt)),
        ("sampling.max_tokens", limits.max_tokens, asked),
        ("priority", limits.priority_max, spec.priority if message.HasField("priority") else None),
    ):
        if most is not None and got is not None and got > most:
            unit = " prompt tokens" if name == field else f" in {message.n} choices" if message.n > 1 else ""
            yield Violation(name, f"this token allows at most {most}{unit}, got {got}")
    if asked is None and limits.max_tokens is not None and message.n > limits.max_tokens:
        text = f"this token allows at most {limits.max_tokens} new tokens in all choices, got {message.n} choices"
        yield Violation("n", text)
