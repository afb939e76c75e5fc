"""Text to token ids and back, at once and token by token. No torch: the router uses this too."""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import tokenizers

from baton.errors import CheckpointError
from baton.model_hub import model_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    _Decode = Callable[[tuple[int, ...]], str]

ORACLE_MODEL = "oracle"
ORACLE_EOS = 256
_CONTEXT_TOKENS = 8  # how much of the prompt can change how the first output tokens are spelled
_INCOMPLETE = "\ufffd"
_FEW = 1024  # ids that are decoded before anybody else has to wait
_SPELLINGS = 1 << 16  # texts of a token or a few that are kept: the context of a stream is mostly one token


class Detokenizer(Protocol):
    """Text of one token stream. What `push` returned, and `flush` at the end, put together are the text of all."""

    def push(self, token_id: int) -> str:
        """The text that became final with this token; empty while a character is incomplete."""

    def flush(self) -> str:
        """The text of tokens whose character was never completed."""


class Tokenizer(ABC):
    """One model's tokenizer. `eos_ids` end a generation; `vocab_size` bounds the ids that it knows.

    `folder` is where it came from, with what else describes the model; None: the oracle.
    """

    vocab_size: int
    eos_ids: tuple[int, ...]
    folder: Path | None = None

    @staticmethod
    def load(folder: Path | str) -> Tokenizer:
        """The tokenizer of a checkpoint folder. Raises CheckpointError naming a file that is missing or wrong."""
        return _FolderTokenizer(Path(folder))

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model wants around it."""

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a text that has its special tokens already: none are added."""
        return self.encode(text)

    @abstractmethod
    def vocabulary(self) -> str | list[bytes]:
        """What each token is spelled as: its bytes by id, or the text of a tokenizer.json."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens have none, and bytes that are not UTF-8 become U+FFFD."""

    @abstractmethod
    def stream(self, prompt: Sequence[int]) -> Detokenizer:
        """Decode what follows `prompt`."""


def load_tokenizer(model_path: Path | str) -> Tokenizer:
    """The tokenizer for `model.path` of the cluster file: `oracle`, a folder, or `hf:org/name` of which the small files
    are downloaded where they are missing. Raises CheckpointError.
    """
    if str(model_path) == ORACLE_MODEL:
        return OracleTokenizer()
    return Tokenizer.load(model_folder(model_path, weights=False))


class OracleTokenizer(Tokenizer):
    """Bytes as tokens, and one more that ends. Any text that is UTF-8 comes back as it was."""

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

    def encode(self, text: str) -> list[int]:
        return self._encode(text, special=True)

    def encode_rendered(self, text: str) -> list[int]:
        return self._encode(text, special=False)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        """As a batch of one: only then does the library let other threads run meanwhile."""
        [found] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = found.ids
        return ids

    def vocabulary(self) -> str:
        text: str = self._tokenizer.to_str()
        return text

    def decode(self, ids: Sequence[int]) -> str:
        text: str
        if len(ids) <= _FEW:
            text = self._tokenizer.decode(ids)
        else:
            [text] = self._tokenizer.decode_batch([ids])  # other threads run meanwhile
        return text

    def stream(self, prompt: Sequence[int]) -> Detokenizer:
        return _ContextStream(self.decode, self._spelling, tuple(prompt[-_CONTEXT_TOKENS:]))


class _ContextStream:
    """Decodes the newest tokens behind the last ones that were final, since spelling depends on neighbours."""

    def __init__(self, decode: _Decode, spelling: _Decode, prompt: tuple[int, ...]) -> None:
        self._decode, self._spelling = decode, spelling
        self._pending: tuple[int, ...] = ()
        self._context, self._known = prompt, decode(prompt)
        if self._known.endswith(_INCOMPLETE):  # the prompt ends within a character: its half is not ours to finish
            self._context, self._known = (), ""

    def push(self, token_id: int) -> str:
        self._pending += (token_id,)
        text = self._decode(self._context + self._pending)
        if len(text) <= len(self._known) or text.endswith(_INCOMPLETE):
            return ""
        piece = text[len(self._known) :]
        self._context, self._pending = self._pending, ()
        self._known = self._spelling(self._context)
        return piece

    def flush(self) -> str:
        piece = self._decode(self._context + self._pending)[len(self._known) :]
        self._pending = ()
        return piece


def _read_eos_ids(folder: Path) -> tuple[int, ...]:
    """`eos_token_id` of generation_config.json and config.json, each a number, a list or absent."""
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
        raise CheckpointError(f"{path}: must hold a JSON object")
    return value
