"""From settings to an engine: devices that are not there, and counters that start at zero."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import load_config
from baton.core import HandoffId, Incarnation, Role, Sampling, SequenceSpec
from baton.engine.fixed import FixedShapes
from baton.engine.oracle import OracleBackend
from baton.errors import ConfigError, InvalidRequest
from baton.tokenizer import OracleTokenizer
from baton.worker.build import build_engine, check_thinking, load_backend, pick_device
from baton.worker.life import _info
from baton.worker.settings import from_config, located
from kvtransfer.transports.choose import make_transports
from tests.unit.model.thinking import thinking_checkpoint

DEMO = Path(__file__).parents[3] / "models/demo"


def settings(tmp_path, *sets):
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: oracle}\nredis: {url: 'redis://127.0.0.1:1/0'}\n")
    return from_config(load_config(file, sets), Role.DECODE, "decode-0")


def test_a_gpu_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert (pick_device("auto"), pick_device("cuda"), pick_device("cpu")) == ("cuda:0", "cuda", "cpu")
    with pytest.raises(ConfigError, match=r"device: cuda:1 is not here \(1 GPUs"):
        pick_device("cuda:1")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert pick_device("auto") == "cpu"
    with pytest.raises(ConfigError, match="cuda"):
        build_engine(settings(tmp_path, "decode.device=cuda"))


def test_a_new_engine_has_been_warmed_and_counts_from_zero(tmp_path):
    engine = build_engine(settings(tmp_path, "decode.kv_memory=1MiB", "decode.block_size=16"))
    load = engine.load()
    assert (load.step, load.prefill_tokens, load.decode_tokens) == (0, 0, 0)
    assert load.blocks.available == load.blocks.total


def test_verify_passes_of_a_new_engine_are_reported(tmp_path):
    """Those that it was warmed with are forgotten, by everybody who counts."""
    engine = build_engine(settings(tmp_path, "decode.kv_memory=1MiB", "determinism.verify=always"))
    spec = SequenceSpec((1, 2, 3), Sampling(max_tokens=40, temperature=0.0, ignore_eos=True), deterministic=True)
    engine.submit(HandoffId("r", 1), spec)
    said = [output for _ in range(100) for output in engine.step().outputs]
    assert said[-1].finish is not None
    assert [token.token_id for output in said for token in output.tokens] == OracleBackend().expected(spec)
    assert engine.load().verify_passes >= 2


def test_what_is_exact_is_not_verified(tmp_path):
    engine = build_engine(settings(tmp_path, "decode.kv_memory=1MiB", "decode.max_running=5"))
    spec = SequenceSpec((1, 2, 3), Sampling(max_tokens=40, temperature=0.0, ignore_eos=True), deterministic=True)
    for number in range(9):
        engine.submit(HandoffId(f"r{number}", 1), spec)
    said = [output for _ in range(200) for output in engine.step().outputs]
    assert sum(output.finish is not None for output in said) == 9
    assert (engine.load().verify_passes, engine.load().decode_tokens) == (0, 9 * 39)


def test_a_worker_whose_bits_vary_takes_no_deterministic_requests(monkeypatch, tmp_path):
    monkeypatch.setattr("baton.engine.selfcheck.check_fixed", lambda backend, shapes: f"{shapes.rows} rows vary")
    sets = ("decode.kv_memory=1MiB", "determinism.rows=4")
    chosen = settings(tmp_path, *sets)
    engine = build_engine(chosen)
    info = _info(chosen, engine, Incarnation(1, 1), "127.0.0.1:1", "")
    assert (info.determinism, info.nondeterminism) == ("", "4 rows vary")
    with pytest.raises(InvalidRequest, match="deterministic"):
        engine.validate(SequenceSpec((1,), Sampling(), deterministic=True))


def test_a_worker_says_what_its_bits_depend_on(tmp_path):
    found = list[str]()
    for sets in ((), ("determinism.rows=4",), ("decode.block_size=32",)):
        chosen = settings(tmp_path, "decode.kv_memory=1MiB", *sets)
        info = _info(chosen, build_engine(chosen), Incarnation(1, 1), "127.0.0.1:1", "")
        assert not info.nondeterminism
        found.append(info.determinism)
    assert found[0] == found[2] != found[1]


def test_a_worker_is_told_how_kv_moves(tmp_path):
    sets = ("transfer.coalesce_below=8KiB", "transfer.staging_memory=64MiB", "transfer.frame_size=1MiB")
    transfer = settings(tmp_path, *sets).transfer
    assert (transfer.coalesce_below, transfer.staging_memory, transfer.frame_size) == (8 << 10, 64 << 20, 1 << 20)
    assert [settings(tmp_path, *verify).transfer.verify_kv for verify in ((), ("transfer.verify=kv",))] == [False, True]


def test_a_worker_is_told_the_shape_of_a_verify_pass(tmp_path):
    assert settings(tmp_path).shapes == FixedShapes(exact_rows=64)
    assert settings(tmp_path, "determinism.verify=always").shapes == FixedShapes()
    assert settings(tmp_path, "determinism.rows=4").shapes == FixedShapes(4, FixedShapes().tokens, exact_rows=64)
    sets = ("determinism.rows=1", "determinism.window=96", "decode.max_running=7")
    assert settings(tmp_path, *sets).shapes == FixedShapes(1, 96, exact_rows=7)


@pytest.mark.parametrize(
    ("sets", "chunk", "message"),
    [
        (("decode.block_size=16",), 12, "decode.block_size: must be a multiple of 12, .* got 16"),
        (("decode.block_size=16",), 32, "decode.block_size: must be a multiple of 32, .* got 16"),
        (("decode.tensor_parallel=2", "decode.device=cpu"), 8, "decode.tensor_parallel: 2: a model that thinks is not"),
    ],
)
def test_a_model_that_thinks_and_does_not_fit_is_refused_by_key(tmp_path, sets, chunk, message):
    check_thinking(settings(tmp_path, *sets), 0)
    with pytest.raises(ConfigError, match=f"^{message}"):
        check_thinking(settings(tmp_path, *sets), chunk)


def test_a_worker_says_that_its_model_thinks_and_what_does_not_fit_is_refused_before_it_is_loaded(
    tmp_path, monkeypatch
):
    thinking_checkpoint(tmp_path / "model", chunk_size=4)
    monkeypatch.setattr("baton.worker.build.load_tokenizer", lambda path: OracleTokenizer())
    sets = (f"model.path={tmp_path / 'model'}", "decode.kv_memory=1MiB", "decode.device=cpu")
    fits = settings(tmp_path, *sets, "decode.block_size=8", "thinking.prefill=sequential")
    engine = build_engine(fits)
    assert _info(fits, engine, Incarnation(1, 1), "127.0.0.1:1", "").thinking_chunk == 4
    assert engine.backend.thinker is not None
    assert engine.backend.thinker.mode == "sequential"
    monkeypatch.setattr("baton.engine.model.build.load_model", None)
    for wrong in ("decode.block_size=6", "decode.tensor_parallel=2"):
        with pytest.raises(ConfigError, match=f"^{wrong.partition('=')[0]}: "):
            load_backend(settings(tmp_path, *sets, wrong))


def test_what_fits_a_model_that_thinks(tmp_path):
    for chunk in (1, 4, 16):
        check_thinking(settings(tmp_path, "decode.block_size=16"), chunk)


@pytest.mark.parametrize("how", ["auto", "fast", "sequential", "off"])
def test_a_worker_is_told_how_to_think(tmp_path, how):
    assert settings(tmp_path, f"thinking.prefill={how}").thinking_prefill == how  # YAML takes one of them for a boolean
    assert settings(tmp_path).thinking_prefill == "auto"
    for wrong in ("on", "no thoughts", "0"):
        with pytest.raises(ConfigError, match=r"thinking\.prefill: input should be 'auto', 'fast'"):
            settings(tmp_path, f"thinking.prefill={wrong}")


def test_too_little_memory_says_how_much_would_do(tmp_path):
    with pytest.raises(ConfigError, match=r"give at least \d+ bytes"):
        build_engine(settings(tmp_path, "decode.kv_memory=64KiB", "model.max_model_len=2048"))


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("decode.tensor_parallel=8", "decode.device=cpu"), r"8 does not divide the model's num_key_value_heads \(4\)"),
        (("decode.tensor_parallel=2", "decode.device=cpu", "model.path=oracle"), "2: the oracle is not divided"),
        (("decode.tensor_parallel=2", "decode.device=cuda:0"), "2 on cuda:0: KV that is divided over GPUs cannot be"),
    ],
)
def test_ranks_that_cannot_be_are_refused_by_key_before_any_starts(monkeypatch, tmp_path, sets, message):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(ConfigError, match=f"^decode.tensor_parallel: {message}"):
        load_backend(settings(tmp_path, f"model.path={DEMO}", *sets))


@pytest.mark.parametrize(
    ("pool", "host"),
    [
        ("listen: '127.0.0.1:0'", "127.0.0.1"),
        ("listen: '0.0.0.0:7000', advertise: 127.0.0.2", "127.0.0.2"),  # where its peers find it
        ("listen: '[::]:7000', advertise: '[::1]'", "::1"),
        ("listen: '0.0.0.0:7000'", "127.0.0.1"),  # without a name of its own it is found from this machine alone
        ("listen: '[::]:7000'", "::1"),
        ("listen: '127.0.0.1:0', advertise: worker-0.example", "127.0.0.1"),
        ("listen: '0.0.0.0:0', advertise: worker-0.example, interface: lo", "127.0.0.1"),
    ],
)
def test_gloo_listens_at_one_address_also_where_the_worker_does_at_all(tmp_path, pool, host):
    file = tmp_path / "cluster.yaml"
    file.write_text(f"model: {{path: oracle}}\ndecode: {{{pool}}}\nsecurity: {{allow_insecure: true}}\n")
    transfer = located(from_config(load_config(file), Role.DECODE, "decode-0")).transfer
    assert transfer.bind_host == host
    assert make_transports(transfer, torch.device("cpu"))[-1].name == "gloo"


@pytest.mark.parametrize("by", ["auto", "load", "load_bf16"])
def test_how_attention_is_split_reaches_the_kernels(tmp_path, by):
    sets = (f"decode.attention_splits={by}", f"model.path={DEMO}", "decode.device=cpu")
    backend: Any = load_backend(settings(tmp_path, *sets))
    kernels = backend.model.kernels
    if kernels.name == "compiled":  # elsewhere it has no effect, and the log says so
        assert kernels.splits == by
    with pytest.raises(ConfigError, match="attention_splits"):
        settings(tmp_path, "prefill.attention_splits=some")


def test_a_worker_looks_at_its_fixed_forwards(tmp_path, monkeypatch):
    sets = (f"model.path={DEMO}", "decode.kv_memory=4MiB", "decode.device=cpu", "model.max_model_len=512")
    assert build_engine(settings(tmp_path, *sets)).backend.nondeterminism == ""
    monkeypatch.setattr("baton.engine.selfcheck.check_fixed", lambda backend, shapes: "its bits vary")
    assert build_engine(settings(tmp_path, *sets)).backend.nondeterminism == "its bits vary"
