"""From one role to the other in one process: what stays loaded, and what is freed before the next pool is made."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from baton.config import load_config
from baton.core import Role
from baton.worker import build, host
from baton.worker.host import _Model, reasons_to_load
from baton.worker.settings import of_both_roles

DEMO = Path(__file__).parents[3] / "models" / "demo"
FILE = "model: {path: oracle}\nprefill: {device: cpu, kv_memory: 1MiB}\ndecode: {device: cpu, kv_memory: 2MiB}\n"


@pytest.fixture
def both(tmp_path):
    (tmp_path / "c.yaml").write_text(FILE)

    def of(*sets, begins=Role.PREFILL):
        return of_both_roles(load_config(tmp_path / "c.yaml", sets), "prefill-7", begins)

    return of


SIZES = ("decode.max_running=5", "decode.prefix_cache=false", "prefill.max_batched_tokens=64")


@pytest.mark.parametrize(
    ("given", "reasons"),
    [
        (SIZES, []),  # pools that differ in sizes alone share the weights
        (["decode.device=cuda:1"], ["device: cpu, cuda:1"]),
        (["decode.threads=3"], ["threads: None, 3"]),
        (["decode.tensor_parallel=2"], ["tensor_parallel: 1, 2"]),
        (["decode.block_size=32"], ["block_size: 16, 32"]),
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


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_the_old_pool_is_freed_before_the_next_one_is_made(both, monkeypatch, again):
    """Also of an engine whose listeners refer to it, as those of roles do, and which was frozen for the collector."""
    sets = [f"model.path={DEMO}", "model.max_model_len=64", *["decode.block_size=32"] * again]
    alive: list[tuple[bool, bool]] = []
    model, settings = _Model(), both(*sets)
    engine = model.engine(settings[Role.PREFILL])
    engine.watch(lambda work, layer: None, cast("Any", engine.release))
    loaded, kv = weakref.ref(cast("Any", engine.backend).model), weakref.ref(engine.kv)

    def build_engine(*given):
        alive.append((loaded() is not None, kv() is not None))
        return build.build_engine(*given)

    monkeypatch.setattr(host, "build_engine", build_engine)
    del engine
    engine = model.engine(settings[Role.DECODE])
    assert alive == [(not again, False)]
    assert model._loaded is not None
    assert engine.backend is model._loaded[1]
    assert engine.pool.total > 0
    model.close()
