"""From settings to an engine, and from one role to the other: rejections, what stays loaded, and what is freed.

Also tests the log of loading a model, and the shape of verify passes: from the cluster file, else from measurements.
"""

import asyncio
import gc
import json
import shutil
import threading
import weakref
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from structlog.testing import capture_logs

from baton.config import load_config
from baton.core import HandoffId, Incarnation, Role, Sampling, SequenceSpec
from baton.engine.determinism.checks import VerifyShapeTimes, device_facts, save_passes
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.kernels.cpu.compiler import machine
from baton.engine.kv_cache import KVCache
from baton.engine.models.checkpoint import LoadProgress
from baton.engine.oracle import OracleBackend, oracle_layout
from baton.errors import ConfigError, InvalidRequest
from baton.tokenizer import OracleTokenizer
from baton.worker import engine_factory, process
from baton.worker.engine_factory import (
    block_size_of,
    build_engine,
    exposes_kv,
    generate,
    level_of,
    load_backend,
    passes_path,
    pick_device,
    settled,
    warm_up,
    warm_up_specs,
    weight_format,
)
from baton.worker.lifecycle import _info
from baton.worker.process import _Model, reasons_to_load
from baton.worker.settings import from_config, located, of_both_roles
from baton.worker.speculation_choice import speculation_of
from kvtransfer.transports.select import make_transports
from tests.support.compiled_kernels import share_kernels
from tests.support.time_factor import scaled
from tests.unit.engine.test_prediction import checkpoint
from tests.unit.model.checkpoints import LATENT, edit_config, thinking_checkpoint

DEMO = Path(__file__).parents[3] / "models/demo"
KV = ("transfer.coalesce_below=8KiB", "transfer.staging_memory=64MiB", "transfer.frame_size=1MiB")
SHAPE = ("determinism.rows=1", "determinism.window=96", "decode.max_running=7")
SIZES = ("decode.max_running=5", "decode.prefix_cache=false", "prefill.max_batched_tokens=64")


def info_of(settings, engine):
    return _info(settings, engine, Incarnation(1, 1), "127.0.0.1:1", "")


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_the_kv_of_prefill_workers_is_exposed_and_that_of_decode_workers_if_it_is_named(monkeypatch, settings, device):
    made = settings()
    named, other = ("shm", "cuda_ipc") if device == "cpu" else ("cuda_ipc", "shm")

    def exposed(role: Role, transport: str, ranks: int = 1) -> bool:
        transfer = replace(made.transfer, transport=transport)
        chosen = replace(made, role=role, transfer=transfer, tensor_parallel=ranks)
        return exposes_kv(chosen, torch.device(device))

    for can in (True, False):
        monkeypatch.setattr(engine_factory, "can_expose", Mock(return_value=can))
        assert exposed(Role.PREFILL, "auto") == can
        assert all(exposed(role, named) for role in Role)
        assert not any(exposed(role, each) for role in Role for each in (other, "nixl"))
        assert not exposed(Role.DECODE, "auto")
        assert exposed(Role.PREFILL, "auto", ranks=2) == (can and device == "cpu")


def test_a_gpu_that_is_not_there_is_named(monkeypatch, settings):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert (pick_device("auto"), pick_device("cuda"), pick_device("cpu")) == ("cuda:0", "cuda:0", "cpu")
    with pytest.raises(ConfigError, match=r"device: cuda:1 is not available \(1 GPUs"):
        pick_device("cuda:1")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert pick_device("auto") == "cpu"
    with pytest.raises(ConfigError, match="cuda"):
        build_engine(settings("decode.device=cuda"))


def test_on_a_gpu_each_kind_of_sampling_is_warmed():
    gpu = torch.device("cuda:0")
    specs = warm_up_specs(cast("Any", Mock(device=gpu, nondeterminism="")))
    kinds = [(s.sampling.temperature > 0, s.sampling.top_p < 1, s.sampling.top_k > 0, s.deterministic) for s in specs]
    no, yes = False, True
    assert kinds[:3] == [(no, no, no, no), (yes, no, no, no), (yes, yes, no, no)]
    assert kinds[3:] == [(yes, no, yes, no), (no, no, no, yes)]
    varying = warm_up_specs(cast("Any", Mock(device=gpu, nondeterminism="bits vary")))
    assert not any(spec.deterministic for spec in varying)


def test_a_new_engine_has_been_warmed_and_counts_from_zero(settings, monkeypatch):
    warmed = Mock(wraps=warm_up)
    monkeypatch.setattr("baton.worker.engine_factory.warm_up", warmed)
    engine = build_engine(settings("decode.kv_memory=1MiB", "decode.block_size=16"))
    warmed.assert_called_once_with(engine)
    load = engine.load()
    assert (load.step, load.prefill_tokens, load.decode_tokens) == (0, 0, 0)
    assert load.blocks.available == load.blocks.total


@pytest.mark.parametrize(("sets", "verified"), [("determinism.verify=always", True), ("decode.max_running=5", False)])
def test_what_is_not_exact_is_verified_and_its_passes_are_reported(settings, sets, verified):
    engine = build_engine(settings("decode.kv_memory=1MiB", sets))
    spec = SequenceSpec((1, 2, 3), Sampling(max_tokens=40, temperature=0.0, ignore_eos=True), deterministic=True)
    handoffs = [HandoffId(f"r{number}", 1) for number in range(9)]
    for handoff in handoffs:
        engine.submit(handoff, spec)
    said = [output for _ in range(200) for output in engine.step().outputs]
    assert {output.key for output in said if output.finish is not None} == set(handoffs)
    for handoff in handoffs:
        ids = [token.token_id for output in said if output.key == handoff for token in output.tokens]
        assert ids == OracleBackend().expected(spec)
    assert (engine.load().verify_passes >= 2) == verified
    assert verified or (engine.load().verify_passes, engine.load().decode_tokens) == (0, 9 * 39)


def test_a_worker_whose_bits_vary_takes_no_deterministic_requests(monkeypatch, settings):
    sets = (f"model.path={DEMO}", "decode.kv_memory=4MiB", "decode.device=cpu", "model.max_model_len=512")
    assert build_engine(settings(*sets)).backend.nondeterminism == ""
    monkeypatch.setattr(
        "baton.engine.determinism.checks.check_fixed", lambda backend, shapes: f"{shapes.rows} rows vary"
    )
    chosen = settings("decode.kv_memory=1MiB", "determinism.rows=4")
    engine = build_engine(chosen)
    info = info_of(chosen, engine)
    assert (info.determinism, info.nondeterminism) == ("", "4 rows vary")
    with pytest.raises(InvalidRequest, match="deterministic"):
        engine.validate(SequenceSpec((1,), Sampling(), deterministic=True))


def test_a_worker_tells_on_which_settings_its_bits_depend(settings):
    sets = "", "determinism.rows=4", "decode.block_size=32"
    chosen = [settings("decode.kv_memory=1MiB", *filter(None, [one])) for one in sets]
    preset, rows, blocks = (info_of(one, build_engine(one)) for one in chosen)
    assert preset.determinism == blocks.determinism != rows.determinism
    assert not any(info.nondeterminism for info in (preset, rows, blocks))


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        (KV, {"coalesce_below": 8 << 10, "staging_memory": 64 << 20, "frame_size": 1 << 20, "verify_kv": False}),
        (("transfer.verify=kv",), {"verify_kv": True}),
        ((), {"shapes": FixedShapes(exact_rows=64), "thinking_prefill": "auto"}),
        (("determinism.verify=always",), {"shapes": FixedShapes(2, 64)}),
        (("determinism.rows=4",), {"shapes": FixedShapes(4, FixedShapes().tokens, exact_rows=64)}),
        (SHAPE, {"shapes": FixedShapes(1, 96, exact_rows=7)}),
        *(((f"thinking.prefill={how}",), {"thinking_prefill": how}) for how in ("auto", "fast", "sequential", "off")),
    ],
)
def test_a_worker_is_told_what_the_file_says(settings, sets, told):
    """Settings of KV, verify passes and thinking. YAML reads the thinking mode "off" as a boolean."""
    found = settings(*sets)
    facts = asdict(found.transfer) | {"shapes": found.shapes, "thinking_prefill": found.thinking_prefill}
    assert {name: facts[name] for name in told} == told


@pytest.mark.parametrize(
    "wrong", [*(f"thinking.prefill={how}" for how in ("on", "no thoughts", "0")), "prefill.attention_splits=some"]
)
def test_what_a_worker_cannot_be_told_is_refused_by_key(settings, wrong):
    with pytest.raises(ConfigError, match=rf"{wrong.partition('=')[0]}: input should be 'auto', "):
        settings(wrong)


@pytest.mark.parametrize(
    ("sets", "chunk", "message"),
    [
        (("decode.block_size=16",), 12, "decode.block_size: must be a multiple of 12, .* got 16"),
        (("decode.block_size=16",), 32, "decode.block_size: must be a multiple of 32, .* got 16"),
        (("decode.tensor_parallel=2", "decode.device=cpu"), 8, "decode.tensor_parallel: 2: a thinking model cannot"),
    ],
)
def test_a_model_that_thinks_and_does_not_fit_is_refused_by_key(settings, sets, chunk, message):
    for fits in (0, 1, 4, 16):
        engine_factory.check_thinking(settings("decode.block_size=16"), fits)
    engine_factory.check_thinking(settings(*sets), 0)
    with pytest.raises(ConfigError, match=f"^{message}"):
        engine_factory.check_thinking(settings(*sets), chunk)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_latent_attention_on_a_gpu_is_rejected_before_the_weights_are_read(settings, tmp_path, monkeypatch, device):
    """An absorbed row of DeepSeek-V2-Lite and V3 has 512 + 64 numbers, more than the widest head of a GPU kernel."""
    latent = {"architectures": ["DeepseekV2ForCausalLM"], "num_attention_heads": 16, "num_key_value_heads": 16}
    latent |= {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 97}
    latent |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(latent | {"kv_lora_rank": 512, "q_lora_rank": None}))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(
        ConfigError, match=rf"^decode.device: cuda(:0)?: {tmp_path} has heads of 576: .*decode.device=cpu$"
    ):
        load_backend(settings(f"model.path={tmp_path}", f"decode.device={device}"))
    for fits in (("cpu", 576), ("cuda:0", 256)):
        engine_factory.check_heads(settings(), *fits)


@pytest.mark.parametrize(
    ("sets", "gpus", "chunk", "sizes"),
    [
        ((), 1, 0, {Role.PREFILL: 256, Role.DECODE: 16}),
        ((), 0, 0, {Role.PREFILL: 16, Role.DECODE: 16}),
        (("prefill.device=cpu",), 1, 0, {Role.PREFILL: 16, Role.DECODE: 16}),
        (("model.path=oracle",), 1, 0, {Role.PREFILL: 16, Role.DECODE: 16}),
        (("prefill.block_size=8", "decode.block_size=32"), 1, 0, {Role.PREFILL: 8, Role.DECODE: 32}),
        ((), 1, 24, {Role.PREFILL: 264, Role.DECODE: 24}),
        ((), 1, 32, {Role.PREFILL: 256, Role.DECODE: 32}),
    ],
)
def test_block_size_auto_is_256_for_prefill_on_a_gpu(both, monkeypatch, sets, gpus, chunk, sizes):
    """FlashAttention needs a multiple of 256. A model that thinks needs a multiple of its chunk."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    found = both(f"model.path={DEMO}", "prefill.device=auto", "decode.device=auto", *sets)
    assert {role: block_size_of(settings, chunk) for role, settings in found.items()} == sizes
    for settings in found.values():
        engine_factory.check_thinking(settings, chunk)


@pytest.mark.parametrize(("left", "right", "same"), [(16, 256, True), (32, 16, True), (8, 16, False)])
def test_prefill_and_decode_workers_on_gpus_have_the_same_bits(monkeypatch, left, right, same):
    """Block sizes differ by default. Fixed forwards use kernels that find positions through block tables."""
    gpu = Mock(name="gpu", major=9, minor=0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: gpu)
    monkeypatch.setattr("baton.engine.determinism.checks.driver_version", lambda: "580.159.04")
    facts = [device_facts(torch.device("cuda"), oracle_layout(size)) for size in (left, right)]
    assert (facts[0] == facts[1]) is same


def test_a_worker_says_that_its_model_thinks_and_what_does_not_fit_is_refused_first(settings, tmp_path, monkeypatch):
    thinking_checkpoint(tmp_path / "model", chunk_size=4)
    monkeypatch.setattr("baton.worker.engine_factory.load_tokenizer", lambda path: OracleTokenizer())
    sets = (f"model.path={tmp_path / 'model'}", "decode.kv_memory=1MiB", "decode.device=cpu")
    fits = settings(*sets, "decode.block_size=8", "thinking.prefill=sequential")
    engine = build_engine(fits)
    assert info_of(fits, engine).thinking_chunk == 4
    assert engine.backend.thinker is not None
    assert engine.backend.thinker.mode == "sequential"
    monkeypatch.setattr("baton.engine.models.loading.load_model", None)
    for wrong in ("decode.block_size=6", "decode.tensor_parallel=2"):
        with pytest.raises(ConfigError, match=f"^{wrong.partition('=')[0]}: "):
            load_backend(settings(*sets, wrong))


def test_speculation_is_on_where_it_is_exact_and_rejected_by_name_where_it_cannot_be(settings, monkeypatch):
    oracle = OracleBackend(oracle_layout())
    with capture_logs() as logs:
        found = speculation_of(settings("decode.speculation=auto"), oracle, FixedShapes(exact_rows=9), load_backend)
    assert found is not None
    assert (found.proposer.name, found.rows, found.fixed, found.exact_rows) == ("ngram", 64, False, 9)
    assert logs == [{"event": "speculation_on", "log_level": "info", "drafter": "ngram", "rows": 64, "fixed": False}]
    assert build_engine(settings("decode.speculation=ngram", "decode.kv_memory=1MiB"))._speculation is not None
    assert speculation_of(settings(), oracle, None, load_backend) is None
    prefill = replace(settings("decode.speculation=ngram"), role=Role.PREFILL)
    assert speculation_of(prefill, oracle, None, load_backend) is None
    cannot = {
        "thinks": OracleBackend(oracle_layout()),
        "recurrent layers": OracleBackend(replace(oracle_layout(), state_size=4)),
        "on a GPU": OracleBackend(oracle_layout()),
    }
    cannot["thinks"].thinker, cannot["on a GPU"].device = Mock(), torch.device("cuda:0")
    for reason, backend in cannot.items():
        with pytest.raises(ConfigError, match=rf"^decode.speculation: ngram is not possible: .*{reason}.*; use off or"):
            speculation_of(settings("decode.speculation=ngram"), backend, None, load_backend)
        with capture_logs() as logs:
            assert speculation_of(settings("decode.speculation=auto"), backend, None, load_backend) is None
        assert reason in logs[0]["reason"]


def test_speculation_where_rows_round_differently_is_only_on_demand(settings, monkeypatch):
    monkeypatch.setattr(OracleBackend, "steady_rows", lambda self: 0)
    oracle = OracleBackend(oracle_layout())
    with capture_logs() as logs:
        assert speculation_of(settings("decode.speculation=auto"), oracle, None, load_backend) is None
        found = speculation_of(settings("decode.speculation=ngram"), oracle, None, load_backend)
    assert found is not None
    assert (found.rows, found.fixed) == (16, False)
    assert [each["event"] for each in logs] == ["speculation_off", "speculation_rounds", "speculation_on"]


@pytest.mark.slow
def test_a_draft_shares_the_memory_and_needs_the_same_vocabulary(settings, tmp_path):
    sets = ("decode.kv_memory=1MiB", "decode.device=cpu")
    whole = build_engine(settings(*sets)).pool.total
    engine = build_engine(settings(*sets, "decode.speculation=draft:oracle"))
    assert engine.pool.total == whole // 2
    spec = SequenceSpec((1, 2, 3), Sampling(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True))
    assert [t.token_id for t in generate(engine, spec).tokens] == OracleBackend().expected(spec)
    assert engine._speculation is not None
    assert engine._speculation._options.proposer.name == "draft"
    with pytest.raises(
        ConfigError, match=r"^decode.speculation: the vocabulary of .* has 2048 tokens, but oracle has 257"
    ):
        build_engine(settings(*sets, f"decode.speculation=draft:{DEMO}"))
    shutil.copytree(DEMO, tmp_path / "other")
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"^decode.speculation: .* has another tokenizer than .*demo"):
        build_engine(settings(*sets, f"model.path={DEMO}", f"decode.speculation=draft:{tmp_path / 'other'}"))


@pytest.mark.parametrize(
    ("sets", "reason"),
    [
        (("model.path=oracle",), "the oracle has no layer for multi-token prediction"),
        ((f"model.path={DEMO}",), r".*demo has no layer for multi-token .* \(model.layers.*eh_proj.weight\); use off"),
        ((f"model.path={DEMO}", "decode.tensor_parallel=2"), "decode.tensor_parallel is 2, .* needs 1; use off or"),
        ((f"model.path={DEMO}", "decode.device=cuda:0"), "steps on a GPU are launched before .*; use off or auto"),
    ],
)
def test_multi_token_prediction_is_refused_by_name_before_the_model_is_loaded(monkeypatch, settings, sets, reason):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("baton.engine.models.loading.Decoder", None)
    monkeypatch.setattr("baton.engine.tp.backend.load_sharded", None)
    with pytest.raises(ConfigError, match=rf"^decode.speculation: mtp is not possible: {reason}"):
        load_backend(settings("decode.device=cpu", *sets, "decode.speculation=mtp"))


def test_multi_token_prediction_shares_the_memory_and_is_loaded_for_decode_workers_only(settings, tmp_path):
    checkpoint(tmp_path)
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    sets = (f"model.path={tmp_path}", "decode.kv_memory=1MiB", "decode.device=cpu", "model.dtype=float32")
    plain, wanted = settings(*sets), settings(*sets, "decode.speculation=mtp")
    assert reasons_to_load(plain, wanted) == ["speculation: off, mtp"]
    assert reasons_to_load(wanted, plain) == reasons_to_load(wanted, wanted) == []
    whole, engine = build_engine(plain).pool.total, build_engine(wanted)
    assert engine._speculation is not None
    assert (engine._speculation._options.proposer.name, engine.pool.total) == ("mtp", whole * 2 // 3)
    with capture_logs() as logs:
        assert build_engine(settings(*sets, "decode.speculation=auto"))._speculation is None
    assert "speculation_off" in [each["event"] for each in logs]


@pytest.mark.parametrize("wrong", ["yes", "draft:", "ngram:3", "mtp:2"])
def test_an_unknown_drafter_is_refused_with_its_key(settings, wrong):
    with pytest.raises(ConfigError, match=r"decode\.speculation"):
        settings(f"decode.speculation={wrong}")


def test_int8_kv_is_part_of_a_worker_and_rejected_for_the_oracle(settings):
    made = load_backend(settings(f"model.path={DEMO}", "model.kv_dtype=int8", "decode.device=cpu"))
    assert made.layout.dtype == "int8"
    with pytest.raises(ConfigError, match=r"^model.kv_dtype: int8 is not supported for the oracle; use auto"):
        load_backend(settings("model.path=oracle", "model.kv_dtype=int8"))


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("decode.tensor_parallel=16", "decode.device=cpu"), r"16 does not divide the model's num_attention_heads"),
        (("decode.tensor_parallel=2", "decode.device=cpu", "model.path=oracle"), "2: the oracle cannot be divided"),
        (("decode.tensor_parallel=4", "decode.device=cuda:0"), r"4 on cuda:0: .* sees 2 from cuda:0 on .* at most 2$"),
    ],
)
def test_ranks_that_cannot_be_are_refused_by_key_before_any_starts(monkeypatch, settings, sets, message):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(ConfigError, match=f"^decode.tensor_parallel: {message}"):
        load_backend(settings(f"model.path={DEMO}", *sets))


def test_ranks_on_gpus_are_accepted(monkeypatch, settings):
    """No GPU is used: only the loader's arguments are checked."""
    loader = Mock()
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("baton.engine.tp.backend.load_sharded", loader)
    loaded = load_backend(settings(f"model.path={DEMO}", "decode.tensor_parallel=2", "decode.device=cuda:0"))
    assert loaded is loader.return_value
    assert loader.call_args.kwargs["device"] == "cuda:0"
    assert loader.call_args.kwargs["ranking"].size == 2


@pytest.mark.parametrize(
    ("pool", "host"),
    [
        ("listen: '127.0.0.1:0'", "127.0.0.1"),
        ("listen: '0.0.0.0:7000', advertise: 127.0.0.2", "127.0.0.2"),  # the address that its peers use
        ("listen: '[::]:7000', advertise: '[::1]'", "::1"),
        ("listen: '0.0.0.0:7000'", "127.0.0.1"),  # without `advertise`, only this machine can reach it
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
    assert make_transports(transfer, KVCache(oracle_layout(16), 1)).transports[-1].name == "gloo"


@pytest.mark.parametrize("by", ["auto", "load", "load_bf16"])
def test_how_attention_is_split_reaches_the_kernels(settings, by):
    sets = (f"decode.attention_splits={by}", f"model.path={DEMO}", "decode.device=cpu")
    backend: Any = load_backend(settings(*sets))
    kernels = backend.model.kernels
    if kernels.name == "compiled":  # elsewhere it has no effect, which is logged
        assert kernels.splits == by


FILE = "model: {path: oracle}\nprefill: {device: cpu, kv_memory: 1MiB}\ndecode: {device: cpu, kv_memory: 2MiB}\n"


@pytest.fixture
def both(tmp_path):
    (tmp_path / "c.yaml").write_text(FILE)

    def of(*sets, begins=Role.PREFILL):
        return of_both_roles(load_config(tmp_path / "c.yaml", sets), "prefill-7", begins)

    return of


@pytest.mark.parametrize(
    ("given", "reasons"),
    [
        (SIZES, []),  # pools that differ in sizes alone share the weights
        (["decode.device=cuda:1"], ["device: cpu, cuda:1"]),
        (["decode.threads=3"], ["threads: None, 3"]),
        (["decode.tensor_parallel=2"], ["tensor_parallel: 1, 2"]),
        (["decode.block_size=32"], []),
        (["decode.tensor_parallel=2", "decode.block_size=32"], ["tensor_parallel: 1, 2", "block_size: 16, 32"]),
        (["decode.attention_splits=load"], ["attention_splits: auto, load"]),
    ],
)
def test_what_a_model_is_loaded_with_must_be_alike(both, given, reasons):
    before, after = both(*given).values()
    assert reasons_to_load(before, after) == reasons
    other = replace(before, dtype="bfloat16", thinking_prefill="off")
    assert reasons_to_load(before, other) == [f"dtype: {before.dtype}, bfloat16", "thinking_prefill: auto, off"]


def test_who_and_where_it_is_stays(both):
    addresses = "prefill.listen=127.0.0.1:7001", "decode.listen=127.0.0.1:7002", "decode.advertise=d.example"
    for begins, (listen, advertise) in {
        Role.PREFILL: ("127.0.0.1:7001", None),
        Role.DECODE: ("127.0.0.1:7002", "d.example"),
    }.items():
        for role, settings in both(*addresses, begins=begins).items():
            assert (settings.worker_id, settings.role) == ("prefill-7", role)
            assert (settings.listen, settings.advertise) == (listen, advertise)


@pytest.fixture
def no_collections():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
@pytest.mark.usefixtures("no_collections")
def test_memory_is_freed_although_another_thread_collects(monkeypatch):
    """A collection returns without an effect while another thread is in one, here in a finalizer of its garbage."""
    collect, inside, tried = gc.collect, threading.Event(), threading.Event()

    class Garbage:
        def __init__(self, finalizer=lambda: None):
            self.me, self.finalizer = self, finalizer

        def __del__(self):
            self.finalizer()

    def tried_once():
        found = collect()
        tried.set()
        return found

    def stay():
        inside.set()
        tried.wait(scaled(30))

    Garbage(stay)
    other = threading.Thread(target=collect)
    other.start()
    assert inside.wait(scaled(30))
    kv = weakref.ref(Garbage())
    monkeypatch.setattr(gc, "collect", tried_once)
    engine_factory.free_memory(kv)
    other.join()
    assert kv() is None


@pytest.mark.slow
def test_a_cache_that_stays_in_use_is_logged_and_does_not_stop_the_worker(monkeypatch):
    monkeypatch.setattr(engine_factory, "FREE_PAUSE_S", 0.0)
    monkeypatch.setattr(engine_factory, "FREE_TRIES", 2)
    used = object()
    with capture_logs() as logs:
        engine_factory.free_memory(lambda: used)
    assert [entry["event"] for entry in logs] == ["old_cache_in_use"]


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_the_old_pool_is_freed_before_the_next_one_is_made(both, monkeypatch, again):
    """An engine is freed although its listeners refer to it, as roles do, and the garbage collector was frozen."""
    sets = [f"model.path={DEMO}", "model.max_model_len=64", "decode.block_size=32", *["decode.threads=2"] * again]
    alive: list[tuple[bool, bool]] = []
    model, settings = _Model(), both(*sets)
    engine = model.engine(settings[Role.PREFILL])
    engine.watch(lambda work, layer: None, cast("Any", engine.release))
    loaded, kv = weakref.ref(cast("Any", engine.backend).model), weakref.ref(engine.kv)

    def build_engine(*given):
        alive.append((loaded() is not None, kv() is not None))
        return engine_factory.build_engine(*given)

    monkeypatch.setattr(process, "build_engine", build_engine)
    del engine
    engine = model.engine(settings[Role.DECODE])
    assert alive == [(not again, False)]
    assert model._loaded is not None
    assert engine.backend is model._loaded[1]
    assert engine.kv.layout.block_size == 32, "cached weights do not keep the block size of the other role"
    assert engine.pool.total > 0
    model.close()


def test_progress_is_logged_at_most_every_two_seconds():
    with capture_logs() as events:
        loading = engine_factory.LoadingLog("hf:org/tiny")
        for seconds in (0.0, 0.1, 1.9, 2.1, 2.2, 4.0, 4.2):
            loading(LoadProgress(int(seconds * 1e9), 5_000_000_000, 3, seconds))
    assert [(event["percent"], event["gb"]) for event in events] == [(0, 0.0), (42, 2.1), (84, 4.2)]
    assert {(event["event"], event["model"], event["of_gb"]) for event in events} == {
        ("model_loading", "hf:org/tiny", 5.0)
    }


def test_the_end_of_loading_is_logged_once(settings):
    with capture_logs() as logged:
        load_backend(settings())  # the oracle loads nothing
        backend = load_backend(settings(f"model.path={DEMO}"))
    events = [event for event in logged if event["event"] != "kernels_torch"]  # logged where no kernels are compiled
    assert [event["event"] for event in events] == ["model_loading", "model_loaded"]
    loaded = events[-1]
    assert (loaded["model"], loaded["dtype"], loaded["device"]) == (str(DEMO), backend.layout.dtype, "cpu")
    assert loaded["gb"] == round((DEMO / "model.safetensors").stat().st_size / 1e9, 3)
    assert loaded["tensors"] > 10
    assert loaded["seconds"] >= 0
    assert loaded["gb_per_s"] > 0
    assert loaded["resident_gb"] > loaded["gb"]


def test_a_length_for_which_positions_are_not_right_is_refused_before_weights_are_read(settings):
    limit = json.loads((DEMO / "config.json").read_text())["max_position_embeddings"]
    with capture_logs() as events, pytest.raises(ConfigError, match=f"between 1 and {limit}, .*got {limit + 1}"):
        load_backend(settings(f"model.path={DEMO}", f"model.max_model_len={limit + 1}"))
    assert events == []
    assert load_backend(settings(f"model.path={DEMO}", "model.max_model_len=60")).max_model_len == 60


PRESET = FixedShapes().rows
MEASURED = VerifyShapeTimes({32: 8.0, 64: 8.0, 128: 8.0, 256: 8.0}, steady=128)


@pytest.fixture
def demo(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_HOME", str(share_kernels(tmp_path / "home")))
    return lambda *sets: settings(f"model.path={DEMO}", "decode.device=cpu", *sets)


def chosen(found):
    """Return rows, tokens, and their source in the log."""
    with capture_logs() as logs:
        shapes = settled(found).shapes
    (line,) = [line for line in logs if line["event"] == "verify_passes"]
    assert (line["rows"], line["tokens"]) == (shapes.rows, shapes.tokens)
    return shapes.rows, shapes.tokens, line["source"]


def test_without_a_measurement_the_shape_is_the_preset(demo):
    assert chosen(demo()) == (PRESET, 32, "preset")
    path = passes_path(demo())
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert chosen(demo()) == (PRESET, 32, "preset"), "a broken file"
    assert settled(demo()).shapes.exact_rows == demo().shapes.exact_rows > 0


def test_the_shape_in_the_cluster_file_comes_first(demo, tmp_path):
    save_passes(passes_path(demo()), MEASURED)
    assert settled(demo()).shapes.exact_rows == demo().shapes.exact_rows
    for sets, expected in {
        (): (4, 32, "profile"),  # steps are exact with it
        ("determinism.rows=1",): (1, 32, "config"),
        ("determinism.rows=1", "determinism.window=64"): (1, 64, "config"),
        ("determinism.window=48",): (PRESET, 48, "preset"),  # it does not divide what was measured
        ("determinism.window=64",): (2, 64, "profile"),
        ("determinism.window=32",): (4, 32, "profile"),
        ("determinism.verify=always",): (4, 64, "profile"),
        (f"model.path={tmp_path}",): (PRESET, 32, "preset"),  # loading reports the missing model
        ("model.path=oracle",): (PRESET, 32, "preset"),
    }.items():
        assert chosen(demo(*sets)) == expected, sets


@pytest.mark.slow
async def test_a_worker_starts_with_the_measured_shape(demo, monkeypatch):
    build_engine, no_engine = Mock(side_effect=ConfigError("enough")), Mock()
    save_passes(passes_path(demo()), MEASURED)
    monkeypatch.setattr(process, "build_engine", build_engine)
    monkeypatch.setattr(process, "load_backend", lambda found: OracleBackend(oracle_layout(4)))
    with pytest.raises(ConfigError, match="enough"):
        await process.serve({Role.DECODE: demo()}, {Role.DECODE: no_engine}, Role.DECODE, asyncio.Event(), print)
    (found, _), _ = build_engine.call_args
    assert found.shapes.rows == 4
    no_engine.assert_not_called()


def test_workers_of_one_kind_and_models_of_one_shape_have_one_place(demo, tmp_path):
    """Two workers of one kind with different numbers of rows would be incompatible."""
    here = passes_path(demo())
    same = ("decode.max_running=3", "decode.block_size=32", "decode.kv_memory=1MiB", "decode.max_batched_tokens=999")
    assert {passes_path(demo(each)) for each in same} == {here}
    others = ("decode.threads=7", "model.dtype=float32", "decode.tensor_parallel=2", "model.quantize=int8")
    assert len({passes_path(demo(each)) for each in others} | {here}) == 5
    another = demo(f"model.path={tmp_path}")
    (tmp_path / "config.json").write_bytes((DEMO / "config.json").read_bytes())
    assert passes_path(another) == here
    (tmp_path / "config.json").write_text("{}")
    assert passes_path(another) != here


def test_the_level_and_the_weights_of_a_worker_are_reported(demo, tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_CPU_LEVEL", "none")
    assert (level_of(demo(), "float32"), level_of(demo("model.path=oracle"), "float32")) == ("none", "")
    assert level_of(demo("model.kv_dtype=int8"), "int8") == "none", "KV in int8 has kernels of the model's dtype"
    assert [weight_format(demo(f"model.quantize={kind}")) for kind in ("none", "int8")] == ["none", "int8"]
    LATENT["v2-lite"].write(tmp_path)
    weights = {"num_bits": 4, "type": "int", "strategy": "channel"}
    section = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    groups = {"g": {"targets": ["Linear"], "weights": weights}}
    edit_config(tmp_path, quantization_config=section | {"config_groups": groups})
    assert weight_format(demo(f"model.path={tmp_path}")) == "compressed-tensors int4 except kv_b_proj"
    edit_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert weight_format(demo(f"model.path={tmp_path}")) == "fp8 block 128 x 128, widened"
    assert "-none-passes" in passes_path(demo()).name
    if "avx2" in machine().flags:
        monkeypatch.setenv("BATON_CPU_LEVEL", "avx2")
        assert "-avx2-passes" in passes_path(demo()).name
