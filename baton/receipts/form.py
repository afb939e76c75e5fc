"""The form of a receipt: a signed part with digests, and an unsigned opening with the values behind the digests.

The signature covers the canonical bytes of all members but `signature` and `opening`: JSON with sorted keys, no spaces,
UTF-8, and integers below 2^53 as its only numbers. This is a subset of RFC 8785 (JCS), which has one form for a value.
Sampling parameters that are floats, and the seed, are decimal texts. Python's `repr` of a float has its exact value.

`prompt.sha256` is the SHA-256 of the prompt's token ids, each as u32. `choices[i].sha256` is the SHA-256 of the 16
bytes "baton receipt 1\\n", then for each token its id (u32) and the bits of its log-probability (f32), then, if a token
ended the choice, the bits of that token's log-probability (f32). All numbers are little-endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import fields
from hashlib import sha256
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from baton.core import Constraint, FinishReason, Kind, Sampling
from baton.errors import InvalidRequest, Violation

_MAGIC = b"baton receipt 1\n"
_UNSIGNED = {"signature", "opening"}
_PARAMETERS = [field for field in fields(Sampling) if field.name != "logprobs"]

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=2**53)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class PromptDigest(_Part):
    """Number and digest of the token ids of the prompt. The ids themselves are never in the signed part."""

    tokens: Count
    sha256: Sha256


class ChoiceDigest(_Part):
    """Digest and end of one choice. `matched_stop` is the stop string, or the id of the token that ended it as text."""

    tokens: Count
    sha256: Sha256
    finish_reason: FinishReason = Field(strict=False)
    matched_stop: str


class OpenedChoice(_Part):
    """The values behind a `ChoiceDigest`: token ids, and 8 hex digits for the bits of each log-probability. `end` is
    the log-probability of the token that ended the choice, or empty.
    """

    ids: list[TokenId]
    logprobs: Annotated[str, Field(pattern=r"^([0-9a-f]{8})*$")]
    end: Annotated[str, Field(pattern=r"^([0-9a-f]{8})?$")] = ""

    @property
    def bits(self) -> list[int]:
        """The bits of each token's log-probability as float32."""
        return list(struct.unpack(f">{len(self.logprobs) // 8}I", bytes.fromhex(self.logprobs)))

    def sha256(self) -> str:
        """Return the digest of these values. Raises ValueError if a token lacks its log-probability."""
        scored = list(chain.from_iterable(zip(self.ids, self.bits, strict=True)))
        end = struct.pack("<I", int(self.end, 16)) if self.end else b""
        return sha256(_MAGIC + struct.pack(f"<{len(scored)}I", *scored) + end).hexdigest()


class Opening(_Part):
    """The values behind the digests. A client may add the ids of the prompt, and may drop any part."""

    prompt_ids: list[TokenId] | None = None
    choices: list[OpenedChoice] | None = None


class ConstraintPart(_Part):
    """The format of the answer, as in `GenerateRequest.constraint`."""

    kind: Kind
    texts: list[str]


class Receipt(_Part):
    """A receipt about all choices of one request. `issued_at` is in seconds since 1970, in UTC. `key` names the public
    key, and `signature` is in base64.
    """

    version: Literal[1]
    request_id: str
    issued_at: Count
    model: str
    system_fingerprint: Annotated[str, Field(min_length=1)]
    prompt: PromptDigest
    sampling: dict[str, JsonValue]
    constraint: ConstraintPart | None
    choices: Annotated[list[ChoiceDigest], Field(min_length=1)]
    key: str
    signature: str
    opening: Opening | None = None

    def signed_bytes(self) -> bytes:
        """Return the canonical bytes that the signature covers."""
        return canonical(self.model_dump(mode="json", exclude=_UNSIGNED))

    def text(self) -> str:
        """Return the receipt as canonical JSON, with signature and opening."""
        whole = self.model_dump(mode="json", exclude={"opening"})
        if self.opening is not None:
            whole["opening"] = self.opening.model_dump(exclude_none=True)
        return canonical(whole).decode()

    def parameters(self) -> dict[str, Any]:
        """Return the sampling parameters as options of the SDK. Raises InvalidRequest naming a wrong one."""
        return sampling_from_json(self.sampling)


def canonical(value: object) -> bytes:
    """Return the canonical JSON of a value without floats."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def parse(value: object) -> Receipt:
    """Return a receipt from parsed JSON. Raises InvalidRequest naming every wrong member, without any value of it."""
    try:
        receipt = Receipt.model_validate_json(json.dumps(value))
    except ValidationError as error:
        found = (Violation(_place(each["loc"]), each["msg"]) for each in error.errors(include_input=False))
        raise InvalidRequest(*found) from None
    sampling_from_json(receipt.sampling)
    _check_opening(receipt)
    return receipt


def _place(location: Iterable[int | str]) -> str:
    return "receipt" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)


def _check_opening(receipt: Receipt) -> None:
    """Check that the opening has the values of the digests. Raises InvalidRequest."""
    opening = receipt.opening or Opening()
    if opening.prompt_ids is not None and prompt_digest(opening.prompt_ids) != receipt.prompt:
        raise InvalidRequest.of("receipt.opening.prompt_ids", "differ from the digest in receipt.prompt")
    if opening.choices is None:
        return
    if len(opening.choices) != len(receipt.choices):
        text = f"must have {len(receipt.choices)} choices, got {len(opening.choices)}"
        raise InvalidRequest.of("receipt.opening.choices", text)
    for place, (opened, digest) in enumerate(zip(opening.choices, receipt.choices, strict=True)):
        fits = 8 * len(opened.ids) == len(opened.logprobs) and len(opened.ids) == digest.tokens
        if not fits or opened.sha256() != digest.sha256:
            text = f"differs from the digest in receipt.choices[{place}].sha256"
            raise InvalidRequest.of(f"receipt.opening.choices[{place}]", text)


def prompt_digest(ids: Sequence[int]) -> PromptDigest:
    """Return number and digest of the ids of a prompt."""
    return PromptDigest(tokens=len(ids), sha256=sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest())


def with_prompt(text: str, ids: Sequence[int]) -> str:
    """Return a receipt, as text, that also opens its prompt. Raises InvalidRequest if `ids` are another prompt."""
    receipt = parse(json.loads(text))
    opening = (receipt.opening or Opening()).model_copy(update={"prompt_ids": list(ids)})
    receipt = receipt.model_copy(update={"opening": opening})
    _check_opening(receipt)
    return receipt.text()


def opened(ids: Sequence[int], logprobs: Sequence[float], end: float | None = None) -> OpenedChoice:
    """Return a choice with the bits of its log-probabilities; `end` is that of the token that ended it."""
    return OpenedChoice(ids=list(ids), logprobs=_hex(*logprobs), end="" if end is None else _hex(end))


def logprob_of(bits: int) -> float:
    """Return the float32 of these bits."""
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _hex(*values: float) -> str:
    return struct.pack(f">{len(values)}f", *values).hex()


def constraint_part(constraint: Constraint | None) -> ConstraintPart | None:
    """Return the format of an answer for its receipt."""
    return ConstraintPart(kind=constraint.kind, texts=list(constraint.texts)) if constraint else None


def sampling_to_json(sampling: Sampling) -> dict[str, JsonValue]:
    """Return all parameters but `logprobs`, which change no bit. Floats and the seed are texts."""
    found: dict[str, JsonValue] = {field.name: _plain(getattr(sampling, field.name)) for field in _PARAMETERS}
    return found | {"seed": str(sampling.seed)}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return repr(value)
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def sampling_from_json(found: dict[str, JsonValue]) -> dict[str, Any]:
    """Return the parameters by name, as options of the SDK. Raises InvalidRequest for a missing or unknown one."""
    names = {field.name for field in _PARAMETERS}
    if names != set(found):
        wrong = sorted(names ^ set(found))[0]
        text = "is missing" if wrong in names else "is not a parameter of this version"
        raise InvalidRequest.of(f"receipt.sampling.{wrong[:64]}", text)
    given = {}
    for field in _PARAMETERS:
        try:
            given[field.name] = _read(field.name, field.default, found[field.name])
        except (OverflowError, TypeError, ValueError):
            raise InvalidRequest.of(f"receipt.sampling.{field.name}", "has a value of a wrong kind") from None
    return given


def _read(name: str, default: object, value: Any) -> Any:
    if name == "seed":
        return int(str(value))
    if name == "logit_bias":
        return {int(token_id): float(bias) for token_id, bias in value}
    if isinstance(default, float):
        if not isinstance(value, str):
            raise TypeError("a float must be a decimal text")
        return float(value)
    if isinstance(default, tuple):
        return list(value)
    return value
