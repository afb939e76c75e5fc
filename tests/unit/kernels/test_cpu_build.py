"""The kernels on this processor: compiled once, no crash where that is impossible, and the files of `baton profile`."""

import errno
import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from structlog.testing import capture_logs

from baton.engine.kernels import select
from baton.engine.kernels.cpu import compiler, kernel_choice, tuning
from baton.engine.kernels.cpu.compiler import Machine, Unavailable, load_library, machine
from baton.engine.kernels.cpu.kernel_choice import (
    FLAT_ROWS,
    Choice,
    Ideas,
    Profile,
    load_profile,
    save_profile,
    static_choice,
)
from baton.engine.kernels.cpu.ops import CpuKernels
from baton.engine.kernels.torch_reference import TorchKernels
from baton.errors import ConfigError
from tests.support.compiled_kernels import compiled_or_skip


@pytest.fixture(autouse=True)
def native(monkeypatch):
    """Remove the level that `make without-kernels` sets, because each test here sets its own."""
    monkeypatch.delenv(compiler.LEVEL_VARIABLE, raising=False)


@pytest.fixture
def able(monkeypatch):
    monkeypatch.setattr(compiler, "machine", lambda: Machine("x", frozenset(compiler.AVX2)))


def test_a_processor_without_the_instructions_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "machine", lambda: Machine("Some CPU", frozenset({"avx512f", "avx2", "f16c"})))
    with pytest.raises(Unavailable, match=r"Some CPU.* has no fma$"):
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
@pytest.mark.parametrize("text", ["exit 0\n", "#!/bin/sh\nexit 0\n"], ids=["no program", "no output"])
def test_what_is_no_compiler_is_no_reason_to_end(monkeypatch, tmp_path, text):
    (tmp_path / "cc").write_text(text)
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    with pytest.raises(Unavailable, match="cannot be compiled or loaded"):
        load_library("f32", tmp_path / "kernels")


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize("element", ["f32", "bf16"])
def test_the_level_none_makes_every_processor_one_without_kernels(monkeypatch, tmp_path, element):
    monkeypatch.setenv("BATON_CPU_LEVEL", "none")
    with pytest.raises(Unavailable, match="BATON_CPU_LEVEL=none"):
        load_library(element, tmp_path)
    assert isinstance(select.choose_kernels(torch.device("cpu"), torch.float32), TorchKernels)


@pytest.mark.parametrize("value", ["avx9", "NONE", " none", "0"])
def test_a_level_that_is_not_known_is_refused_by_name(monkeypatch, tmp_path, value):
    monkeypatch.setenv("BATON_CPU_LEVEL", value)
    allowed = "native, none, neon, avx2, avx-vnni, avx512, avx512-vnni, avx512-bf16"
    with pytest.raises(ConfigError, match=rf"BATON_CPU_LEVEL \(environment\): must be one of {allowed}, got '{value}'"):
        load_library("f32", tmp_path)


def test_the_level_is_that_of_the_processor_unless_it_is_set(monkeypatch):
    assert compiler.cpu_level() == "native"
    for value in ("", "native"):
        monkeypatch.setenv("BATON_CPU_LEVEL", value)
        assert compiler.cpu_level() == "native"


@pytest.mark.parametrize(
    ("flags", "levels"),
    [
        (compiler.AVX2, ["avx2", "avx2", None, None]),
        (compiler.AVX512, ["avx512", "avx2", "avx512", None]),
        (compiler.LEVELS["avx-vnni"], ["avx-vnni", "avx2", None, None]),
        (compiler.LEVELS["avx512-vnni"], ["avx512-vnni", "avx2", "avx512", None]),
        (compiler.LEVELS["avx512-bf16"], ["avx512-bf16", "avx2", "avx512", "avx512-bf16"]),
    ],
)
def test_the_best_level_is_chosen_and_a_lower_one_can_be_forced(monkeypatch, flags, levels):
    monkeypatch.setattr(compiler, "machine", lambda: Machine("Some CPU", frozenset(flags)))
    for asked, level in zip(("native", "avx2", "avx512", "avx512-bf16"), levels, strict=True):
        monkeypatch.setenv("BATON_CPU_LEVEL", asked)
        if level is not None:
            assert compiler.chosen_level() == level
            continue
        with pytest.raises(Unavailable, match=r"Some CPU.* has no avx512"):
            compiler.chosen_level()


@pytest.mark.parametrize(
    ("processor", "flags", "level"),
    [("aarch64", "fp asimd asimddp", "neon"), ("aarch64", "fp asimd", None), ("x86_64", "fma avx2", None)],
)
def test_neon_needs_an_aarch64_processor_with_the_dot_product(monkeypatch, tmp_path, processor, flags, level):
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nFeatures\t: {flags}\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n")
    here = machine(file)
    assert here.model == "0x41/0xd40"
    monkeypatch.setattr(compiler, "machine", lambda: here)
    monkeypatch.setattr("platform.machine", lambda: processor)
    for asked in ("native", "neon") if processor == "aarch64" else ("neon",):
        monkeypatch.setenv("BATON_CPU_LEVEL", asked)
        if level:
            assert compiler.chosen_level() == level
            continue
        with pytest.raises(Unavailable, match=r"0x41/0xd40.* has no .*asimddp"):
            compiler.chosen_level()


@pytest.mark.slow
def test_it_is_compiled_once(monkeypatch, tmp_path):
    compiled_or_skip(lambda: load_library("f32", tmp_path))
    (library,) = tmp_path.glob("*.so")
    before = library.stat().st_mtime_ns
    load_library("f32", tmp_path)
    assert set(tmp_path.iterdir()) == {library, library.with_suffix(".lock")}
    assert library.stat().st_mtime_ns == before
    assert not os.access(tmp_path / "kernels.o", os.F_OK)
    cut = tmp_path / "other" / library.name
    cut.parent.mkdir()
    cut.write_bytes(b"")
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOSYS, "no locks here")))
    load_library("f32", cut.parent)
    assert cut.stat().st_size > 0, "a file that a crash has cut is compiled again"


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


K = 32
STATIC = static_choice(K)


def points(tall: float = 1.0, **others_over_flat: float) -> list[tuning.Point]:
    """Return one point per `rNNN=ratio`. The tall kernel's time is `tall` times torch's."""
    return [tuning.Point(64, K, int(name[1:]), 1.0, ratio * tall, ratio) for name, ratio in others_over_flat.items()]


@pytest.mark.parametrize(
    ("ratios", "flat_rows"),
    [
        ({"r1": 1.0, "r64": 1.0, "r96": 1.0, "r128": 1.02, "r512": 0.98}, FLAT_ROWS),  # no clear winner: the preset
        ({"r1": 2.0, "r16": 1.2, "r32": 0.8, "r64": 0.7, "r128": 0.7}, 16),  # not used from the first slower one
        ({"r1": 0.5, "r16": 0.5}, 0),
        ({"r1": 2.0, "r96": 1.3, "r128": 1.3, "r192": 1.2, "r256": 0.9, "r384": 0.8}, 192),  # as far as it leads
        ({"r1": 2.0, "r8": 1.5, "r16": 0.7, "r32": 1.5, "r96": 1.3, "r128": 0.7, "r192": 0.6}, FLAT_ROWS),  # disturbed
    ],
)
def test_the_flat_kernel_is_taken_as_far_as_it_leads(ratios, flat_rows):
    assert STATIC.flat_rows == FLAT_ROWS
    found = tuning.best_choice(points(**ratios))
    assert found.flat_rows == flat_rows
    assert found == STATIC or flat_rows != FLAT_ROWS


@pytest.mark.parametrize(("ratio", "tall"), [(0.5, True), (2.0, False)])
def test_the_faster_of_the_tall_kernel_and_torch_is_taken(ratio, tall):
    assert tuning.best_choice(points(ratio, r1=4.0, r128=0.4, r512=0.4)).tall is tall


def test_a_processor_with_a_tile_unit_leaves_many_rows_to_torch(monkeypatch):
    monkeypatch.setattr(kernel_choice, "machine", lambda: Machine("x", frozenset({kernel_choice.TILE_UNIT})))
    assert not static_choice(K).tall
    monkeypatch.setattr(kernel_choice, "machine", lambda: Machine("x", frozenset()))
    assert static_choice(K).tall
    assert static_choice(kernel_choice.LONG_K).flat_rows < static_choice(kernel_choice.LONG_K - 1).flat_rows


@pytest.mark.parametrize(
    ("attention", "expected"), [([2.0, 1.0], kernel_choice.UNIFIED), ([1.0, 0.98], None), ([1.0, 2.0], None)]
)
def test_the_preset_maximum_must_be_clearly_faster(attention, expected):
    assert tuning.make_profile(points(r1=2.0), attention).unified_max == expected


@pytest.mark.parametrize(
    ("ideas", "kernels"),
    [
        (Ideas(), ["flat", "flat", "torch"]),  # as the profile has it
        (Ideas(flat_gemm=False), ["flat", "tall", "tall"]),
        (Ideas(dispatch=False), ["flat", "flat", "flat"]),
        (Ideas(flat_gemm=False, dispatch=False), ["tall", "tall", "tall"]),
    ],
)
def test_each_idea_is_a_switch_of_its_own(ideas: Ideas, kernels: list[str]):
    measured = Profile({(64, 32): Choice(7, tall=False)}, unified_max=5.0)
    for unified in (False, True):
        found = replace(ideas, unified_max=unified).applied(measured)
        assert [found.choice(64, 32).product(rows) for rows in (1, 7, 8)] == kernels
        assert found.unified_max == (kernel_choice.UNIFIED if unified else None)


def test_ideas_replace_what_the_profile_decides(monkeypatch):
    compiled_or_skip(lambda: compiler.load_library("f32"))
    monkeypatch.setattr(select, "load_profile", lambda _: Profile(unified_max=5.0))
    for ideas, expected in ((None, 5.0), (Ideas(), None), (Ideas(unified_max=True), kernel_choice.UNIFIED)):
        made = select.choose_kernels(torch.device("cpu"), torch.float32, ideas=ideas)
        assert isinstance(made, CpuKernels)
        assert made.profile.unified_max == expected


def test_a_profile_survives_the_disk_and_is_added_to(tmp_path):
    path = tmp_path / "deep" / "file.json"
    first = Profile({(64, 32): Choice(7, True), (1, 2): Choice(3, False)}, 0.0)
    save_profile(path, first)
    assert load_profile(path) == first
    save_profile(path, load_profile(path).merged(Profile({(64, 32): Choice(9, False)})))
    assert load_profile(path) == Profile({(64, 32): Choice(9, False), (1, 2): Choice(3, False)}, None)
    assert load_profile(path).choice(64, 32).flat_rows == 9
    assert load_profile(path).choice(5, 5) == static_choice(5)


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"choices": [[1, 2]], "unified_max": None})])
def test_a_broken_file_means_the_defaults(tmp_path, text):
    path = tmp_path / "p.json"
    path.write_text(text)
    assert load_profile(path) == Profile() == load_profile(tmp_path / "absent")


def test_another_torch_level_dtype_or_thread_count_has_another_profile(tmp_path):
    other = ("f32", "avx2", 1, "2"), ("bf16", "avx512", 1, "2"), ("bf16", "avx2", 2, "2"), ("bf16", "avx2", 1, "3")
    paths = {kernel_choice.profile_path(*key, tmp_path) for key in (("bf16", "avx2", 1, "2"), *other)}
    assert len(paths) == 5


def test_a_profile_of_another_level_is_named_and_not_used(tmp_path):
    other, wanted = (kernel_choice.profile_path("bf16", level, 1, "2", tmp_path) for level in ("avx2", "avx512"))
    save_profile(other, Profile({(64, 32): Choice(7, True)}))
    with capture_logs() as logs:
        assert load_profile(wanted) == Profile()
    (line,) = logs
    assert (line["event"], line["wanted"], line["found"]) == ("profile_not_used", wanted.name, [other.name])


@pytest.mark.parametrize("given", [None, "/var/cache/kernels"])
def test_compiled_gpu_kernels_are_kept_in_the_state_folder_unless_triton_is_told_another(monkeypatch, tmp_path, given):
    """The variable is set before triton is imported; a missing triton then ends the choice."""
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", given or "")
    if given is None:
        monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(select, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "baton.engine.kernels.gpu.ops", None)
    with pytest.raises(ImportError):
        select.choose_kernels(torch.device("cuda:0"), torch.bfloat16)
    assert os.environ["TRITON_CACHE_DIR"] == (given or str(tmp_path / "kernels" / "triton"))
