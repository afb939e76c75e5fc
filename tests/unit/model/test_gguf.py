"""GGUF files, against transformers on the widened weights. transformers reads the same tensors from such files."""

import json
import random
import re
import struct
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from baton.config import ClusterConfig
from baton.engine.models.checkpoint import Checkpoint
from baton.engine.models.config import read_config
from baton.engine.models.loading import load_model
from baton.errors import CheckpointError
from baton.gguf.config import config_of, tokenizer_config_of
from baton.gguf.folder import gguf_folder
from baton.gguf.header import GgufHeader, TensorInfo, read_header
from baton.limits import MAX_GGUF_ENTRIES, MAX_GGUF_FLOATS
from baton.model_hub import model_folder
from baton.tokenizer import load_tokenizer
from tests.support.compiled_kernels import share_kernels
from tests.support.gguf_files import Export
from tests.unit.model.checkpoints import (
    LLAMA3,
    LONG_FACTORS,
    MIXTRAL,
    QWEN,
    YARN,
    edit_config,
    parameter_of,
    random_checkpoint,
    rope,
)
from tests.unit.model.harness import check_equal, greedy, prompts

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
WINDOW: dict[str, Any] = {"attention.sliding_window": 24}
GEMMA2 = {**WINDOW, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA: dict[str, Any] = {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}
GRANITE = {"embedding_scale": 3.0, "residual_scale": 0.3, "attention.scale": 0.2, "logit_scale": 4.0}
GRANITE_HUB = {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2}
SIX: dict[str, Any] = {"num_attention_heads": 6}
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0}
YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
BETAS = {"rope.scaling.yarn_beta_fast": 1.5, "rope.scaling.yarn_beta_slow": 0.25}
SHORT, LONG = LONG_FACTORS["short_factor"], LONG_FACTORS["long_factor"]
PHI3 = {
    **SIX, **rope(rope_type="longrope", **LONG_FACTORS, partial_rotary_factor=0.75, attention_factor=1.2),
    "original_max_position_embeddings": 400,
}  # fmt: skip
# Name: architecture, family and settings of the checkpoint, and further metadata.
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama-tied": ("llama", "llama", {"tie_word_embeddings": True, "head_dim": 20}, {}),
    "llama-linear": ("llama", "llama", rope(rope_type="linear", factor=3.0), LINEAR),
    "llama-yarn": ("llama", "llama", rope(**YARN), YARN_KEYS),
    "llama-yarn-betas": ("llama", "llama", rope(**YARN, beta_fast=1.5, beta_slow=0.25), YARN_KEYS | BETAS),
    "mixtral": ("llama", "mixtral", MIXTRAL, {}),
    "qwen2": ("qwen2", "qwen2", {}, {}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 32}, {}),
    "qwen3moe": ("qwen3moe", "qwen3_moe", QWEN | {"norm_topk_prob": True}, {}),
    "gemma2": ("gemma2", "gemma2", GEMMA, GEMMA2),
    "gemma3": ("gemma3", "gemma3_text", GEMMA | {"num_hidden_layers": 7}, WINDOW),
    "phi3": ("phi3", "phi3", {"sliding_window": 24}, WINDOW),
    "starcoder2": ("starcoder2", "starcoder2", {"sliding_window": 24}, WINDOW),
    "stablelm": ("stablelm", "stablelm", SIX | {"use_qkv_bias": True}, {"use_parallel_residual": True}),
    "stablelm-2": ("stablelm", "stablelm", SIX | {"use_parallel_residual": True}, {}),
    "nemotron": ("nemotron", "nemotron", {"head_dim": 16}, {}),
    "granite": ("granite", "granite", GRANITE_HUB | {"logits_scaling": 4.0}, GRANITE),
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 4}, {}),
    "arcee": ("arcee", "arcee", {"head_dim": 12}, {}),
    "olmo2": ("olmo2", "olmo2", {}, {}),
    "command-r": ("command-r", "cohere", {"use_qk_norm": True, "logit_scale": 0.3}, {"logit_scale": 0.3}),
    "cohere2": (
        "cohere2", "cohere2", {"num_hidden_layers": 4, "sliding_window": 24, "head_dim": 16},
        WINDOW | {"logit_scale": 0.0625},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_HOME", str(share_kernels(tmp_path / "home")))


def unpacked(path: Path) -> Path:
    """Return the folder of a file with a tokenizer that no test reads."""
    with patch("baton.gguf.folder._tokenizer", return_value="{}"):
        return gguf_folder(path)


@pytest.mark.slow
@pytest.mark.sample(6)
@pytest.mark.parametrize("name", MODELS)
def test_architectures(name: str, tmp_path: Path):
    architecture, family, settings, keys = MODELS[name]
    reference = random_checkpoint(tmp_path, family, **settings)
    Export(tmp_path, tmp_path / "m.gguf", architecture, **keys)
    check_equal(unpacked(tmp_path / "m.gguf"), reference)


def test_factors_of_frequencies_lie_in_a_tensor(tmp_path: Path):
    """The converter writes those of Llama 3.1 and of Phi 3."""
    reference = random_checkpoint(tmp_path, "llama", **rope(rope_type="llama3", **LLAMA3))
    plain = 1.0 / (10000.0 ** (torch.arange(0, 12, 2) / 12))
    factors = (plain / reference.model.rotary_emb.inv_freq).tolist()
    assert len(set(factors)) > 1
    Export(tmp_path, tmp_path / "m.gguf", "llama", tensors={"rope_freqs.weight": factors})
    check_equal(unpacked(tmp_path / "m.gguf"), reference)


def test_long_and_short_factors(tmp_path: Path):
    reference = random_checkpoint(tmp_path, "phi3", **PHI3)
    tensors = {"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG}
    keys: dict[str, Any] = {"rope.scaling.original_context_length": 400, "rope.scaling.attn_factor": 1.2}
    Export(tmp_path, tmp_path / "m.gguf", "phi3", tensors=tensors, **keys)
    check_equal(unpacked(tmp_path / "m.gguf"), reference)


KINDS = {"F32": "", "F16": "", "BF16": "", "Q8_0": "int8", "Q4_0": "int4", "Q5_1": "", "Q4_K": "", "Q6_K": ""}
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2, "head_dim": 64}


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_types(kind: str, family: str, tmp_path: Path):
    """All values are those of the file. A model of levels that kernels hold rounds its activations."""
    more = QWEN | {"norm_topk_prob": True, "moe_intermediate_size": 256} if family == "qwen3moe" else {}
    hub = {"qwen3moe": "qwen3_moe"}.get(family, family)
    reference = random_checkpoint(tmp_path, hub, **SIZES, **{k: v for k, v in more.items() if k != "head_dim"})
    export = Export(tmp_path, tmp_path / "m.gguf", family, kind)
    folder = unpacked(tmp_path / "m.gguf")
    config = read_config(folder)
    assert config.quantised is not None
    assert config.quantised.summary == f"gguf {kind}" if family == "llama" else kind in config.quantised.summary
    assert config.quantised.packs == bool(KINDS[kind])
    checkpoint = Checkpoint(folder, stored=config.quantised, packs=True)
    for name, wide in export.wide.items():
        if ".experts." not in name:
            assert torch.equal(checkpoint.take(name, tuple(wide.shape)).float(), wide), name
            parameter_of(reference, name).copy_(wide)
    layer = "model.layers.0.self_attn.q_proj.weight"
    scheme = checkpoint.scheme([layer])
    assert ("" if scheme is None else f"int{scheme.bits}") == KINDS[kind]
    for i in range(2 if family == "qwen3moe" else 0):
        experts, at = reference.model.layers[i].mlp.experts, f"model.layers.{i}.mlp.experts"
        gate, up, down = (export.wide[f"{at}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        experts.gate_up_proj.copy_(torch.cat((gate, up), 1))
        experts.down_proj.copy_(down)
    if not KINDS[kind]:
        edit_config(folder, dtype="float32")
        return check_equal(folder, reference)
    [row] = greedy(load_model(folder, dtype="float32"), prompts((40,)), 1, random.Random(1))
    logits = reference(torch.tensor([row.tokens[:40]])).logits[0, -1]
    assert (row.logits[39] - logits).norm() < 0.1 * logits.norm()


def test_parts_of_a_split_file_are_one_model(tmp_path: Path):
    reference = random_checkpoint(tmp_path, "llama")
    Export(tmp_path, tmp_path / "m.gguf", "llama", largest=12)
    first, *others = sorted(tmp_path.glob("*.gguf"))
    assert others
    check_equal(unpacked(first), reference)
    with pytest.raises(CheckpointError, match=rf"{others[0].name}: is not the first part .* {first.name}"):
        gguf_folder(others[0])
    others[0].unlink()
    with pytest.raises(CheckpointError, match=re.escape(f"{first.name}: the part {others[0].name} is missing")):
        gguf_folder(first)
    with pytest.raises(CheckpointError, match=r"m-00001-of-00000.gguf: is a part of 00000 parts, but a model has at"):
        gguf_folder(tmp_path / "m-00001-of-00000.gguf")


def test_a_fingerprint_is_that_of_the_content(tmp_path: Path):
    random_checkpoint(tmp_path, "llama")
    found = []
    for name, kind in (("a", "F16"), ("b", "F16"), ("c", "Q8_0")):
        Export(tmp_path, tmp_path / f"{name}.gguf", "llama", kind if kind == "F16" else "BF16")
        found.append(load_model(unpacked(tmp_path / f"{name}.gguf"), dtype="float32").fingerprint)
    assert found[0] == found[1] != found[2]
    data = bytearray((tmp_path / "a.gguf").read_bytes())
    data[-40] ^= 1
    (tmp_path / "a.gguf").write_bytes(data)
    assert load_model(unpacked(tmp_path / "a.gguf"), dtype="float32").fingerprint != found[0]


# Name: change of the file's bytes, and the words of the error.
BROKEN: dict[str, tuple[Any, str]] = {
    "empty": (lambda data: b"", "cannot be read: cannot mmap an empty file"),
    "magic": (lambda data: b"GGML" + data[4:], "magic is b'GGML', expected b'GGUF'"),
    "version": (lambda data: data[:4] + b"\x01\0\0\0" + data[8:], r"version is 1 \(supported: 2, 3"),
    "header": (lambda data: data[:100], "m.gguf: .* needs .* bytes at byte .*, but the file has 100"),
    "weights": (lambda data: data[:-500], r"m.gguf: [a-z.0-9_]+ ends at byte .*: it is not complete"),
    "type": (
        lambda data: _with_byte(data, b"output_norm.weight", 4 + 8, 77), "output_norm.weight has the unknown type 77",
    ),
    "dimensions": (lambda data: _with_byte(data, b"output_norm.weight", 0, 9), "output_norm.weight has 9 dimensions"),
    "size": (
        lambda data: _with_byte(data, b"output_norm.weight", 4, 0), r"output_norm.weight has the shape \[0\], but no",
    ),
    "value": (
        lambda data: _with_byte(data, b"llama.block_count", 0, 99), "llama.block_count has the unknown type 99",
    ),
    "architecture": (
        lambda data: data.replace(b"\0llama", b"\0llamq"), "general.architecture 'llamq' is not supported .*llama",
    ),
    "key": (lambda data: data.replace(b"llama.block_count", b"llama.block_cound"), "llama.block_count is missing"),
    "text": (lambda data: data.replace(b"gpt-2", b"gpt\xff2"), "tokenizer.ggml.pre is not UTF-8"),
}  # fmt: skip


def _with_byte(data: bytes, name: bytes, after: int, value: int) -> bytes:
    at = data.index(name) + len(name) + after
    return data[:at] + bytes([value]) + data[at + 1 :]


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(name: str, tmp_path: Path):
    random_checkpoint(tmp_path, "llama")
    change, words = BROKEN[name]
    Export(tmp_path, tmp_path / "m.gguf", "llama")
    (tmp_path / "m.gguf").write_bytes(change((tmp_path / "m.gguf").read_bytes()))
    with pytest.raises(CheckpointError, match=words) as caught:
        model_folder(tmp_path / "m.gguf")
    assert str(tmp_path / "m.gguf") in str(caught.value)
    assert not list((tmp_path / "home").rglob("config.json"))


PHI = {"embedding_length": 96, "attention.head_count": 6, "rope.dimension_count": 12, "feed_forward_length": 80}
PHI |= {"block_count": 2, "context_length": 512}


def header_of(**metadata: Any) -> GgufHeader:
    """Return the header of a model with the architecture phi3."""
    found = {"general.architecture": "phi3", "phi3.attention.layer_norm_rms_epsilon": 1e-5}
    found |= {f"phi3.{name}": number for name, number in PHI.items()} | metadata
    path = Path("m.gguf")
    return GgufHeader(path, found, {"token_embd.weight": TensorInfo(path, "F32", (64, 96), 0, 24576)})


def test_a_missing_tensor_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"^m.gguf: rope_factors_long.weight is missing"):
        header_of().floats("rope_factors_long.weight")
    random_checkpoint(tmp_path, "llama")
    with pytest.raises(CheckpointError, match="tensor ups is missing"):
        Checkpoint(tmp_path).dtype("ups")


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({}, None),
        ({"scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scale_linear": 4.0, "scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"scaling.type": "linear", "scaling.factor": 1.0}, None),
        ({"scaling.type": "none", "scaling.factor": 2.0}, None),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.yarn_beta_fast": 16.0},
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 1.0}
            | {"original_max_position_embeddings": 512},
        ),
    ],
)
def test_rotations_without_a_type_are_linear_as_in_llama_cpp(keys: dict[str, Any], scaling: dict[str, Any] | None):
    header = header_of(**{f"phi3.rope.{name}": value for name, value in keys.items()})
    assert config_of(header).get("rope_scaling") == scaling


@pytest.mark.parametrize(
    ("name", "keys", "found"),
    [
        ("gemma2", {}, (4096, 50.0)),  # the defaults of llama.cpp
        ("gemma2", {**WINDOW, "attn_logit_softcapping": 20.0}, (24, 20.0)),
        ("phi3", {}, (None, None)),
        ("phi3", {"attention.sliding_window": 0}, (None, None)),  # as Phi 4 has it
        ("phi3", WINDOW, (24, None)),
        ("starcoder2", {}, (None, None)),
    ],
)
def test_windows_and_soft_caps_without_a_key(
    name: str, keys: dict[str, Any], found: tuple[int | None, float | None], tmp_path: Path
):
    random_checkpoint(tmp_path, name)
    Export(tmp_path, tmp_path / "m.gguf", name, **keys)
    first = read_config(unpacked(tmp_path / "m.gguf")).spec.attention[0]
    assert (first.reach.window, first.soft_cap) == found


@pytest.mark.parametrize(("name", "family"), [("gemma3", "gemma3_text"), ("cohere2", "cohere2")])
def test_a_window_that_no_default_replaces(name: str, family: str, tmp_path: Path):
    random_checkpoint(tmp_path, family)
    Export(tmp_path, tmp_path / "m.gguf", name)
    with pytest.raises(CheckpointError, match=f"m.gguf: {name}.attention.sliding_window is missing"):
        unpacked(tmp_path / "m.gguf")


def test_stablelm_is_parallel_if_a_layer_has_one_norm(tmp_path: Path):
    """Converters set the flag for all models, and llama.cpp does not read it."""
    for parallel in (False, True):
        random_checkpoint(tmp_path, "stablelm", **SIX, use_parallel_residual=parallel)
        Export(tmp_path, tmp_path / "m.gguf", "stablelm", use_parallel_residual=True)
        assert config_of(read_header(tmp_path / "m.gguf"))["use_parallel_residual"] is parallel


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("general.architecture", ["phi3"], r"\['phi3'\] is not supported"),
        ("phi3.attention.head_count", 0, "must be one whole number from 1 for all layers, got 0"),
        ("phi3.attention.head_count", 97, "phi3.attention.key_length must be one whole number from 1 .*, got 0"),
        ("phi3.attention.head_count_kv", [6, 0], r"must be one whole number from 1 for all layers, got \[6, 0\]"),
        ("phi3.attention.key_length", 0, "must be one whole number from 1 for all layers, got 0"),
        ("phi3.block_count", -1, "must be one whole number from 1 for all layers, got -1"),
        ("phi3.rope.freq_base", "much", "must be a number, got 'much'"),
        ("phi3.rope.freq_base", [1.0], r"must be a number, got \[1.0\]"),
        ("phi3.rope.scaling.type", "dynamic", r"'dynamic' is not supported \(supported: none, linear, yarn\)"),
        ("phi3.rope.scaling.factor", "much", "must be a number, got 'much'"),
        ("phi3.rope.scaling.attn_factor", 1.2, "must be 1, got 1.2"),
        ("phi3.rope.scaling.yarn_attn_factor", 1.2, "must be 1, got 1.2"),
        ("phi3.rope.scaling.yarn_ext_factor", 0.5, "must be 1, got 0.5"),
        ("tokenizer.ggml.tokens", 7, "must be an array, got 7"),
        ("tokenizer.ggml.token_type", 3, "must be an array, got 3"),
    ],
)
def test_metadata_of_another_kind(key: str, value: Any, words: str):
    assert config_of(header_of())["head_dim"] == 16
    changed = header_of(**{key: value})
    with pytest.raises(CheckpointError, match=words if words.startswith("phi3") else f"m.gguf: {key} {words}"):
        config_of(changed)
    if key == "tokenizer.ggml.tokens":
        with pytest.raises(CheckpointError, match=words):
            tokenizer_config_of(changed)


def test_large_arrays_and_factors_are_rejected(tmp_path: Path):
    """A file of few gigabytes would else become many times as much memory."""
    path = tmp_path / "m.gguf"
    arrays = {b"one": 7, b"two": MAX_GGUF_ENTRIES - 6}
    data = (struct.pack("<Q3sIIQ", 3, key, 9, 0, count) + bytes(count) for key, count in arrays.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + b"".join(data))
    with pytest.raises(CheckpointError, match=r"m.gguf: two brings arrays to 4194305 entries, at most 4194304 in all"):
        read_header(path)
    info = TensorInfo(path, "F32", (MAX_GGUF_FLOATS + 1,), 0, 4 * MAX_GGUF_FLOATS + 4)
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight has 65537 numbers, at most 65536 are allowed"):
        GgufHeader(path, {}, {"rope_freqs.weight": info}).floats("rope_freqs.weight")


def test_levels_of_another_shape(tmp_path: Path):
    random_checkpoint(tmp_path, "llama", **SIZES)
    Export(tmp_path, tmp_path / "m.gguf", "llama", "Q8_0")
    folder = unpacked(tmp_path / "m.gguf")
    edit_config(folder, intermediate_size=500)
    with pytest.raises(CheckpointError, match=r"m.gguf: blk.0.ffn_[a-z]+.weight has shape .*512.*, expected .*500"):
        load_model(folder)


@pytest.mark.parametrize(("kind", "size"), [("Q8_0", 34), ("Q4_K", 144)])
def test_scales_must_be_finite(kind: str, size: int, tmp_path: Path):
    random_checkpoint(tmp_path, "llama", **SIZES)
    Export(tmp_path, tmp_path / "m.gguf", "llama", kind)
    folder, tensors = unpacked(tmp_path / "m.gguf"), read_header(tmp_path / "m.gguf").tensors
    name, info = next((name, info) for name, info in tensors.items() if "ffn_up" in name)
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    data[info.start + size : info.start + size + 2] = b"\xff\xff"  # a NaN of float16
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=f"m.gguf: {name} has a scale that is not a finite number"):
        load_model(folder)


def test_any_bytes_are_read_or_rejected(tmp_path: Path, seed: int):
    random_checkpoint(tmp_path, "llama")
    path, rng = tmp_path / "m.gguf", random.Random(seed)
    Export(tmp_path, path, "llama")
    whole, rejected = path.read_bytes(), 0
    for _ in range(300):
        data = bytearray(whole[: rng.choice((len(whole), rng.randrange(len(whole))))])
        for _ in range(rng.randrange(4) if data else 0):
            data[rng.randrange(min(len(data), 4000))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            read_header(path)
        except CheckpointError as error:
            assert str(path) in str(error)  # noqa: PT017
            rejected += 1
    assert rejected > 100


TEXTS = ("The color of dog", "naïve  café\n\n 12345 it's", "日本語 🙂", "<|endoftext|>a", "", "   x")


@pytest.mark.slow
def test_the_tokenizer_of_a_byte_level_vocabulary(tmp_path: Path):
    """The demo model: ids, texts, chat template and ends are those of its folder."""
    template = (DEMO / "chat_template.jinja").read_text()
    keys: dict[str, Any] = {
        "tokenizer.chat_template": template,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 5,
    }
    Export(DEMO, tmp_path / "demo.gguf", "llama", "F16", **keys)
    folder, hub = model_folder(tmp_path / "demo.gguf"), load_tokenizer(DEMO)
    mine = load_tokenizer(tmp_path / "demo.gguf")
    assert [mine.encode(text) for text in TEXTS] == [hub.encode(text) for text in TEXTS]
    assert [mine.decode(hub.encode(text)) for text in TEXTS] == [hub.decode(hub.encode(text)) for text in TEXTS]
    assert (mine.vocab_size, set(mine.eos_ids)) == (hub.vocab_size, {0, 5})
    assert (folder / "chat_template.jinja").read_text() == template
    assert folder.name == "demo"
    assert ClusterConfig.model_validate({"model": {"path": str(tmp_path / "demo.gguf")}}).model.name == "demo"


@pytest.mark.slow
def test_the_tokenizer_of_a_sentencepiece_vocabulary(tmp_path: Path):
    """Scores in place of merges, a first token, and bytes for unknown characters."""
    from transformers import LlamaTokenizer

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefghij"]
    merges = [("a", "b"), ("ab", "c"), ("▁", "abc"), ("d", "e"), ("▁", "de")]
    vocab = {piece: i for i, piece in enumerate([*pieces, *("".join(pair) for pair in merges)])}
    hub = LlamaTokenizer(vocab=vocab, merges=merges)
    random_checkpoint(tmp_path, "llama", vocab_size=len(vocab))
    scores = [0.0] * len(pieces) + [-float(i) for i in range(len(merges))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(vocab) - 259)
    with patch.object(Export, "_tokenizer", lambda self, _: _sentencepiece(self.writer, list(vocab), scores, kinds)):
        bos: dict[str, Any] = {"tokenizer.ggml.bos_token_id": 1}
        Export(tmp_path, tmp_path / "m.gguf", "llama", **bos)
    mine = load_tokenizer(tmp_path / "m.gguf")
    for text in ("abc de", "abcé", "</s>", ""):
        assert mine.encode(text) == [1, *hub.encode(text, add_special_tokens=False)], text
        assert mine.decode(mine.encode(text)) == hub.decode(mine.encode(text), skip_special_tokens=True)
    assert mine.encode(" abc") == [1, vocab["▁"], vocab["▁abc"]], "a space comes before any text, as in llama.cpp"
    assert mine.encode("</s>de") == [1, 2, vocab["▁de"]]


def _sentencepiece(writer: Any, tokens: list[str], scores: list[float], kinds: list[int]) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)


@pytest.mark.slow
def test_words_of_llama_3_are_found_whole(tmp_path: Path):
    """A word of the vocabulary is one token, also if no merges lead to it. The first token is added by default."""
    edited = json.loads((DEMO / "tokenizer.json").read_text())
    word = next(
        text for text, i in edited["model"]["vocab"].items() if text.isascii() and text.isalpha() and len(text) > 4
    )
    edited["model"]["merges"] = [pair for pair in edited["model"]["merges"] if "".join(pair) != word]
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((DEMO / file).read_bytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps(edited))
    keys: dict[str, Any] = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": 7}
    Export(tmp_path, tmp_path / "m.gguf", "llama", **keys)
    assert load_tokenizer(tmp_path / "m.gguf").encode(word) == [7, edited["model"]["vocab"][word]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"tokenizer.ggml.pre": "no-such"}, r"tokenizer.ggml.pre 'no-such' is not supported \(supported: llama3.*gguf"),
        ({"tokenizer.ggml.eos_token_id": 5000}, r"tokenizer.ggml.eos_token_id must be the id of a token, got 5000"),
    ],
)
def test_tokenizers_that_are_rejected(keys: dict[str, Any], words: str, tmp_path: Path):
    Export(DEMO, tmp_path / "demo.gguf", "llama", **keys)
    with pytest.raises(CheckpointError, match=words):
        model_folder(tmp_path / "demo.gguf")


def test_a_file_without_a_tokenizer(tmp_path: Path):
    random_checkpoint(tmp_path, "llama")
    with patch.object(Export, "_tokenizer"):
        Export(tmp_path, tmp_path / "m.gguf", "llama")
    with pytest.raises(CheckpointError, match=r"tokenizer.ggml.tokens is missing: this file has no tokenizer"):
        model_folder(tmp_path / "m.gguf")
