"""Tokenizers and streaming detokenizers. No torch: the router uses this too."""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import tokenizers

from baton.errors import CheckpointError
from baton.model_hub import model_folder

_Decode = Callable[[tuple[int, ...]], str]
ORACLE_MODEL = "oracle"
ORACLE_EOS = 256
_CONTEXT_TOKENS = 8  # number of prompt tokens that can change the spelling of the first output tokens
_INCOMPLETE = "\ufffd"
_CHARACTER = 4  # UTF-8 bytes of a character, and its most tokens
_MANY = 16  # tokens without final text; from then on, only the last ones may wait for the rest of a character
_FEW = 1024  # ids that may be decoded while other threads wait
_SPELLINGS = 1 << 16  # cached texts of short token sequences; the context of a stream is mostly one token


class Detokenizer(Protocol):
    """Text of one token stream. The results of all `push` calls and of `flush` add up to the text of all tokens."""

    def push(self, token_id: int) -> str:
        """Return the text that became final with this token; empty while a character is incomplete."""

    def flush(self) -> str:
        """Return the text of tokens with an incomplete character."""


class Tokenizer(ABC):
    """One model's tokenizer. `eos_ids` end a generation; ids are below `vocab_size`. The oracle's `folder` is None."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    folder: Path | None = None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt, with the model's special tokens around it."""

    def encode_rendered(self, text: str) -> list[int]:
        """Return the token ids of a text that already has its special tokens."""
        return self.encode(text)

    @abstractmethod
    def vocabulary(self) -> str | list[bytes]:
        """Return the spelling of each token: its bytes by id, or the text of a tokenizer.json."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`. Special tokens have no text; bytes that are not UTF-8 become U+FFFD."""

    @abstractmethod
    def stream(self, prompt: Sequence[int]) -> Detokenizer:
        """Return a detokenizer for the tokens after `prompt`."""


def load_tokenizer(model_path: Path | str) -> Tokenizer:
    """Return the tokenizer of `oracle`, a folder, or `hf:org/name` (downloads small files). Raises CheckpointError."""
    if str(model_path) == ORACLE_MODEL:
        return OracleTokenizer()
    return _FolderTokenizer(model_folder(model_path, weights=False))


class OracleTokenizer(Tokenizer):
    """One token per byte, and one end token. UTF-8 text round-trips exactly."""

    vocab_size = ORACLE_EOS + 1
    eos_ids = (ORACLE_EOS,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def vocabulary(self) -> list[bytes]:
        return [bytes((byte,)) for byte in range(ORACLE_EOS)] + [b""]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < ORACLE_EOS).decode(errors="replace")

    def stream(self, prompt: Sequence[int]) -> Detokenizer:
        return _ByteStream()


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes((token_id,))) if token_id < ORACLE_EOS else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _FolderTokenizer(Tokenizer):
    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(f"{path}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.folder = folder
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.eos_ids = _read_eos_ids(folder)
        self._spelling = lru_cache(_SPELLINGS)(self.decode)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str) -> list[int]:
        return self._encode(text, special=True)

    def encode_rendered(self, text: str) -> list[int]:
        return self._encode(text, special=False)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        """Encode as a batch of one, because only then the library releases the GIL."""
        [found] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = found.ids
        return ids

    def vocabulary(self) -> str:
        return str(self._tokenizer.to_str())

    def decode(self, ids: Sequence[int]) -> str:
        text: str
        if len(ids) <= _FEW:
            text = self._tokenizer.decode(ids)
        else:
            [text] = self._tokenizer.decode_batch([ids])  # releases the GIL
        return text

    def stream(self, prompt: Sequence[int]) -> Detokenizer:
        return _ContextStream(self.decode, self._spelling, self._is_silent, tuple(prompt[-_CONTEXT_TOKENS:]))

    def _is_silent(self, token_id: int) -> bool:
        return token_id in self._special or token_id >= self.vocab_size


class _ContextStream:
    """Detokenizer that decodes new tokens after the last final ones, because spelling depends on neighbours. `silent`
    tokens have no text and no effect on that of others. The time of a `push` does not grow with the stream.
    """

    def __init__(
        self, decode: _Decode, spelling: _Decode, silent: Callable[[int], bool], prompt: tuple[int, ...]
    ) -> None:
        self._decode, self._spelling, self._silent = decode, spelling, silent
        self._pending: tuple[int, ...] = ()
        self._context, self._known = prompt, decode(prompt)
        if self._known.endswith(_INCOMPLETE):  # the prompt ends within a character, which the output must not complete
            self._context, self._known = (), ""

    def push(self, token_id: int) -> str:
        if self._silent(token_id):
            return ""
        self._pending += (token_id,)
        text = self._decode(self._context + self._pending)
        if len(text) > len(self._known) and not text.endswith(_INCOMPLETE):
            return self._take(len(self._pending), text)
        return self._take_invalid(text) if len(self._pending) > _MANY else ""

    def _take_invalid(self, text: str) -> str:
        """Return the text before the last tokens that may belong to one character. Bytes before it are not UTF-8."""
        last = len(self._pending) - _CHARACTER
        for count in range(last, last - _CHARACTER, -1):  # one of these ends a character
            first = self._decode(self._context + self._pending[:count])
            if len(first) > len(self._known) and text.startswith(first):
                return self._take(count, first)
        return ""

    def _take(self, count: int, text: str) -> str:
        """Return the end of `text`, that of the context and of the first `count` pending tokens."""
        piece = text[len(self._known) :]
        self._context, self._pending = self._pending[:count], self._pending[count:]
        self._known = self._spelling(self._context)
        return piece

    def flush(self) -> str:
        piece = self._decode(self._context + self._pending)[len(self._known) :]
        self._pending = ()
        return piece


def _read_eos_ids(folder: Path) -> tuple[int, ...]:
    """Return `eos_token_id` of generation_config.json and config.json; each is a number, a list or absent."""
    found: list[int] = []
    for path in (folder / "generation_config.json", folder / "config.json"):
        value = _read_object(path).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for i in ids:
            if type(i) is not int or i < 0:
                raise CheckpointError(f"{path}: eos_token_id must be a token id or a list of them, got {value!r}")
            found.append(i)
    return tuple(dict.fromkeys(found))


def _read_object(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must be a JSON object")
    return value
