"""Compiling the kernels: once per machine, and without a crash where it is impossible."""

import os
import stat
import subprocess
import sys

import pytest
import torch

from baton.engine.kernels import select
from baton.engine.kernels.cpu import compiler
from baton.engine.kernels.cpu.compiler import Machine, Unavailable, load_library, machine
from baton.engine.kernels.torch_reference import TorchKernels
from baton.errors import ConfigError
from tests.support.compiled_kernels import compiled_or_skip


@pytest.fixture(autouse=True)
def native(monkeypatch):
    """Remove the level that `make without-kernels` sets, because each test here sets its own."""
    monkeypatch.delenv(compiler.LEVEL_VARIABLE, raising=False)


@pytest.fixture
def able(monkeypatch):
    monkeypatch.setattr(compiler, "machine", lambda: Machine("x", frozenset(compiler.NEEDED["bf16"])))


def test_a_processor_without_the_instructions_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "machine", lambda: Machine("Some CPU", frozenset({"avx512f", "avx2"})))
    with pytest.raises(Unavailable, match=r"Some CPU.*avx512bw"):
        load_library("f32", tmp_path)


@pytest.mark.usefixtures("able")
def test_no_compiler_is_said_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(Unavailable, match="no C compiler was found"):
        load_library("bf16", tmp_path)


@pytest.mark.usefixtures("able")
def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] && echo broken 1 && exit 0\necho it is a teapot >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(Unavailable, match="it is a teapot"):
        load_library("f32", tmp_path / "kernels")


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize("element", ["f32", "bf16"])
def test_the_level_none_makes_every_processor_one_without_kernels(monkeypatch, tmp_path, element):
    monkeypatch.setenv("BATON_CPU_LEVEL", "none")
    with pytest.raises(Unavailable, match="BATON_CPU_LEVEL=none"):
        load_library(element, tmp_path)
    assert isinstance(select.choose_kernels(torch.device("cpu"), torch.float32), TorchKernels)


@pytest.mark.parametrize("value", ["avx512", "NONE", " none", "0"])
def test_a_level_that_is_not_known_is_refused_by_name(monkeypatch, tmp_path, value):
    monkeypatch.setenv("BATON_CPU_LEVEL", value)
    with pytest.raises(ConfigError, match=rf"BATON_CPU_LEVEL \(environment\): must be native or none, got '{value}'"):
        load_library("f32", tmp_path)


def test_the_level_is_that_of_the_processor_unless_it_is_set(monkeypatch):
    assert compiler.cpu_level() == "native"
    for value in ("", "native"):
        monkeypatch.setenv("BATON_CPU_LEVEL", value)
        assert compiler.cpu_level() == "native"


@pytest.mark.slow
def test_it_is_compiled_once(monkeypatch, tmp_path):
    compiled_or_skip(lambda: load_library("f32", tmp_path))
    (library,) = tmp_path.glob("*.so")
    before = library.stat().st_mtime_ns
    load_library("f32", tmp_path)
    assert set(tmp_path.iterdir()) == {library, library.with_suffix(".lock")}
    assert library.stat().st_mtime_ns == before
    assert not os.access(tmp_path / "kernels.o", os.F_OK)


def test_the_processor_is_read_off_linux(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: A CPU\nflags\t\t: fpu avx512f\n\nprocessor\t: 1\nmodel name\t: B\n")
    assert machine(file) == Machine("A CPU", frozenset({"fpu", "avx512f"}))
    assert machine(tmp_path / "absent").flags == frozenset()


@pytest.mark.slow
def test_a_program_that_has_not_loaded_torch_can_load_them():
    compiled_or_skip(lambda: load_library("f32"))
    program = "from baton.engine.kernels.cpu.compiler import load_library; load_library('f32')"
    subprocess.run([sys.executable, "-c", program], check=True)
