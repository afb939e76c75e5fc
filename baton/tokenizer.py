"""Tokenizers and streaming detokenizers. No torch: the router uses this too."""

from __future__ import annotations

import codecs
import json
import re
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Protocol

import tokenizers

from baton.errors import CheckpointError
from baton.gguf.conversion import output_of
from baton.hashing import fingerprint
from baton.model_hub import check_file, model_folder

_Decode = Callable[[tuple[int, ...]], str]
_Json = dict[str, object]
ORACLE_MODEL = "oracle"
ORACLE_EOS = 256
_INCOMPLETE = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a token that is one byte, in vocabularies of sentencepiece
_LONE = re.compile("[\udc80-\udcff]")  # bytes that are no text, as `surrogateescape` writes them
_FEW = 1024  # ids that may be decoded while other threads wait
_SPELLINGS = 1 << 16  # cached texts of short token sequences; the context of a stream is mostly one token
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# Special tokens that have a text in streams, because they mark reasoning and calls.
_MARKS = frozenset(
    ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<think>", "</think>", "<tool_call>", "</tool_call>",
     "<|tool_call|>", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "<arg_key>", "</arg_key>", "<arg_value>",
     "</arg_value>", "<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>", "<minimax:tool_call>",
     "</minimax:tool_call>", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call_begin|>",
     "<|tool_call_argument_begin|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
     *(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")))
)  # fmt: skip
_HARMONY = "<|channel|>"
_HARMONY_MARKS = frozenset((_HARMONY, "<|start|>", "<|end|>", "<|message|>", "<|constrain|>"))
# Files with a tokenizer, the best first. `transformers` converts the others.
TIKTOKEN = "tiktoken.model"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", TIKTOKEN, "vocab.json")
_CONVERT = "from transformers import AutoTokenizer as A; A.from_pretrained({0!r}).save_pretrained({0!r})"
_CONVERSION = """
import sys
from transformers import AutoTokenizer, PreTrainedTokenizerFast
found = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False)
if not isinstance(found, PreTrainedTokenizerFast):  # for example that of mistral-common, which has no such form
    found = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
sys.stdout.write(found.backend_tokenizer.to_str())
"""


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

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of a text without special tokens around it. The text may contain such tokens itself."""
        return self.encode(text)

    @abstractmethod
    def vocabulary(self) -> str | list[bytes]:
        """Return the spelling of each token: its bytes by id, or the text of a tokenizer.json."""

    def identity(self) -> str:
        """Return a digest of the spelling of each id, 24 hex digits; the same in all versions of `tokenizers`. Added
        tokens do not count, because a later revision of a model may declare more.
        """
        return fingerprint([str(self.vocabulary())])

    def token_id(self, text: str) -> int | None:
        """Return the id of the token that is written as `text`, such as `</think>`."""
        return None

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`. Special tokens have no text; bytes that are not UTF-8 become U+FFFD."""

    @abstractmethod
    def piece(self, token_id: int) -> tuple[bytes, bool]:
        """Return the bytes of a token as it is written after another one, and whether it is special. The bytes may be a
        part of a character, and are empty for an id without a token.
        """

    @abstractmethod
    def stream(self, prompt: Sequence[int], *, special: bool = False) -> Detokenizer:
        """Return a detokenizer for the tokens after `prompt`. Marks of reasoning and calls have a text, and all special
        tokens if `special`.
        """


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

    def piece(self, token_id: int) -> tuple[bytes, bool]:
        return (bytes([token_id]), False) if token_id < ORACLE_EOS else (b"", True)

    def stream(self, prompt: Sequence[int], *, special: bool = False) -> Detokenizer:
        return _ByteStream()


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes((token_id,))) if token_id < ORACLE_EOS else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _FolderTokenizer(Tokenizer):
    """The tokenizer of a checkpoint. `vocab_size` covers the model's padded vocabulary, whose ids it may generate."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = _read_tokenizer(folder)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config, model = (read_object(folder / name) for name in ("tokenizer_config.json", "config.json"))
        padded = _padded_vocabulary(model)
        try:
            _declare(self._tokenizer, _declared_tokens(folder, config), padded)
        except ValueError as error:  # an id that is no number, a text that is no UTF-8
            raise CheckpointError(f"{folder / 'tokenizer_config.json'}: a token is invalid: {error}") from error
        self.folder = folder
        self._own_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.vocab_size = max(self._own_size, padded)
        self.eos_ids = _read_eos_ids(folder, self._tokenizer.token_to_id(_content(config.get("eos_token"))))
        self._spelling = lru_cache(_SPELLINGS)(self.decode)
        self._whole = lru_cache(_SPELLINGS)(lambda ids: str(self._tokenizer.decode(ids, skip_special_tokens=False)))
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        marks = _MARKS | (_HARMONY_MARKS if self.token_id(_HARMONY) is not None else frozenset())
        special = {token_id: token.content for token_id, token in added.items() if token.special}
        self._marks = {i: text for i, text in special.items() if text in marks and i not in self.eos_ids}
        bytewise = self._tokenizer.token_to_id("<0x00>") is not None
        self._errors = "surrogateescape" if bytewise else "replace"

    def encode(self, text: str) -> list[int]:
        return self._encode(text, special=True)

    def encode_plain(self, text: str) -> list[int]:
        return self._encode(text, special=False)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        """Encode as a batch of one, because only then the library releases the GIL."""
        [found] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = found.ids
        return ids

    def token_id(self, text: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def vocabulary(self) -> str:
        return str(self._tokenizer.to_str())

    def identity(self) -> str:
        words = self._tokenizer.get_vocab(with_added_tokens=False)
        return fingerprint(f"{token_id} {word}" for token_id, word in sorted((i, word) for word, i in words.items()))

    def decode(self, ids: Sequence[int]) -> str:
        text: str
        if len(ids) <= _FEW:
            text = self._tokenizer.decode(ids)
        else:
            [text] = self._tokenizer.decode_batch([ids])  # releases the GIL
        return text

    def stream(self, prompt: Sequence[int], *, special: bool = False) -> Detokenizer:
        spelling, silent = (self._whole, self._is_unknown) if special else (self._spelling, self._is_silent)
        last = next((token_id for token_id in reversed(prompt) if not silent(token_id)), None)
        stream = _ContextStream(spelling, self._bytes, silent, self._letter, last, self._errors)
        stream.marks = {} if special else self._marks
        return stream

    def piece(self, token_id: int) -> tuple[bytes, bool]:
        if token_id in self._special:
            return (self._tokenizer.id_to_token(token_id) or "").encode(), True
        if self._is_silent(token_id):
            return b"", False
        text = self._spelling((*self._letter, token_id))[len(self._spelling(self._letter)) :]
        part = self._bytes(token_id) if _INCOMPLETE in text else None
        return text.encode() if part is None else part, False

    def _is_silent(self, token_id: int) -> bool:
        return token_id in self._special or self._is_unknown(token_id)

    def _is_unknown(self, token_id: int) -> bool:
        return self._tokenizer.id_to_token(token_id) is None

    def _bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a token that are a part of a character, or None if it is text."""
        token = self._tokenizer.id_to_token(token_id) or ""
        if found := _BYTE.fullmatch(token):
            return bytes.fromhex(found[1])
        return bytes(map(_ALPHABET.__getitem__, token)) if _ALPHABET.keys() >= set(token) else None

    @cached_property
    def _letter(self) -> tuple[int, ...]:
        """Return a token that is text, a letter if there is one, or none. It does not change the token after it."""
        letters = filter(None, map(self._tokenizer.token_to_id, string.ascii_letters))
        return next(((token_id,) for token_id in (*letters, *range(self._own_size)) if self._is_text(token_id)), ())

    def _is_text(self, token_id: int) -> bool:
        token = self._tokenizer.id_to_token(token_id) or ""
        text = "" if _BYTE.fullmatch(token) or self._is_silent(token_id) else self.decode([token_id])
        return text.isprintable() and text[-1:].isalnum()


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character with which byte-level vocabularies are written."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in plain)
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


class _ContextStream:
    """Detokenizer that decodes each token after the one before, because spelling depends on neighbours. `silent` tokens
    have no text and no effect on that of others. Bytes wait only while they may begin a character, so at most three. A
    token after them, or after a prompt that ends within a character, is decoded after `letter`.
    """

    def __init__(
        self,
        spelling: _Decode,
        bytes_of: Callable[[int], bytes | None],
        silent: Callable[[int], bool],
        letter: tuple[int, ...],
        last: int | None,
        errors: str,
    ) -> None:
        self._spelling, self._bytes_of, self._silent, self._letter = spelling, bytes_of, silent, letter
        self.marks: Mapping[int, str] = {}  # silent tokens that have a text nevertheless
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)
        self._context: tuple[int, ...] = () if last is None else (last,)
        if _INCOMPLETE in spelling(self._context):
            self._context = letter

    def push(self, token_id: int) -> str:
        if mark := self.marks.get(token_id):
            return self.flush() + mark
        if self._silent(token_id):
            return ""
        piece = self._spelling((*self._context, token_id))[len(self._spelling(self._context)) :]
        part = self._bytes_of(token_id) if _INCOMPLETE in piece else None
        if part is None:
            self._context = (token_id,)
            return self.flush() + piece
        self._context = self._letter
        return self._decoded(part)

    def flush(self) -> str:
        return self._decoded(b"", final=True)

    def _decoded(self, part: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(part, final)
        return text if text.isascii() else _LONE.sub(_INCOMPLETE, text)


def _read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    source = next((name for name in TOKENIZERS if (folder / name).is_file()), path.name)
    if source != path.name:
        return tokenizers.Tokenizer.from_str(_converted(folder, source))
    check_file(path)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path}: {error}") from error


def _converted(folder: Path, source: str) -> str:
    """Return the tokenizer.json that `transformers` makes of other files, in another process: it may import torch."""
    convert = f'python -c "{_CONVERT.format(str(folder))}"'
    remedy = f"pip install transformers sentencepiece tiktoken mistral-common, then {convert}"
    if source == TIKTOKEN:  # most need code of the checkpoint, and that writes no tokenizer.json either
        remedy = "add a tokenizer.json that was made elsewhere, because no code of a checkpoint runs"
    problem = f"{folder}: no tokenizer.json, and {source} cannot be converted"
    return output_of(("-c", _CONVERSION, str(folder)), problem, remedy)


def _padded_vocabulary(config: _Json) -> int:
    """Return the number of ids that the model computes by config.json, or 0 if it is absent."""
    inner = config.get("text_config")
    found = (inner if isinstance(inner, dict) else config).get("vocab_size", config.get("vocab_size"))
    return found if isinstance(found, int) else 0


def _declared_tokens(folder: Path, config: _Json) -> list[tokenizers.AddedToken]:
    """Return the tokens of tokenizer_config.json, as `transformers` adds them. Older files count if it lists none."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        older = _checked(folder / "added_tokens.json", by_id=True)
        listed = {token_id: {"content": text, "special": False} for text, token_id in older.items()}
        config = config | _checked(folder / "special_tokens_map.json")
    by_id = sorted(listed.items(), key=lambda item: int(item[0]))
    names = [*_NAMED, *(name for name in config if name.endswith("_token") and name not in _NAMED)]
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    others = list(extra.values()) if isinstance(extra, dict) else extra if isinstance(extra, list) else []
    more = [config.get(name) for name in names] + others
    special = {_content(value) for value in more}
    found = {_content(value): _added(value, special=_content(value) in special) for _, value in by_id}
    found |= {_content(value): _added(value, special=True) for value in more if _content(value) not in found}
    return [token for text, token in found.items() if text]


def _checked(path: Path, *, by_id: bool = False) -> _Json:
    """Return the tokens of a small file, perhaps with their ids. Raises CheckpointError."""
    found = read_object(path)
    for name, value in found.items():
        if by_id and type(value) is not int:
            raise CheckpointError(f"{path}: the id of {name!r} must be a whole number, got {value!r}")
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except ValueError as error:  # half a surrogate pair
        raise CheckpointError(f"{path}: a token is invalid: {error}") from error
    return found


def _content(value: object) -> str:
    """Return the text of a token, which is declared as a text or an object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _added(value: object, *, special: bool) -> tokenizers.AddedToken:
    flags = {key: bool(value[key]) for key in _FLAGS if key in value} if isinstance(value, dict) else {}
    flags = {"normalized": False} | flags | ({"special": True} if special else {})
    return tokenizers.AddedToken(_content(value), **flags)


def _declare(tokenizer: tokenizers.Tokenizer, declared: list[tokenizers.AddedToken], padded: int) -> None:
    """Add tokens that the tokenizer does not list, unless the model has no row for them."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    new, room = [], max(0, padded - tokenizer.get_vocab_size()) if padded else len(declared)
    for token in declared:
        fresh = tokenizer.token_to_id(token.content) is None
        if token.content not in known and (room or not fresh):
            new.append(token)
            room -= fresh
    tokenizer.add_tokens(new)


def _read_eos_ids(folder: Path, own: int | None) -> tuple[int, ...]:
    """Return `eos_token_id` of generation_config.json and config.json, each a number, a list or absent, and `own`."""
    found: list[int] = []
    for path in (folder / "generation_config.json", folder / "config.json"):
        config = read_object(path)
        inner = config.get("text_config")
        value = config.get("eos_token_id", inner.get("eos_token_id") if isinstance(inner, dict) else None)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for i in ids:
            if type(i) is not int or i < 0:
                raise CheckpointError(f"{path}: eos_token_id must be a token id or a list of them, got {value!r}")
            found.append(i)
    return tuple(dict.fromkeys(found if own is None else [*found, own]))


def read_object(path: Path) -> _Json:
    """Return the JSON object of a small file of a checkpoint, empty if there is none. Raises CheckpointError."""
    if not path.is_file():
        return {}
    check_file(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must be a JSON object")
    return value
