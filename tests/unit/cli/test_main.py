"""Errors become exit codes, in one place; `baton --help` costs next to nothing."""

import os
import subprocess
import sys

import pytest

from baton import errors
from baton.cli import app as app_module
from baton.cli import exit_code, main
from baton.cluster.processes import StartError
from baton.errors import BatonError, InvalidRequest, Overloaded, Violation

CODES = {  # interfaces.md
    "InvalidRequest": 2, "UnknownModel": 2, "ConfigError": 3, "CheckpointError": 3, "LedgerError": 4, "NoWorker": 4,
    "Overloaded": 5, "Cancelled": 130,
}  # fmt: skip
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BatonError)]


def made(kind):
    return InvalidRequest(Violation("a", "b")) if kind is InvalidRequest else kind("because")


@pytest.mark.parametrize("kind", [*KINDS, StartError], ids=lambda kind: kind.__name__)
def test_every_error_has_its_exit_code_and_one_message(kind, monkeypatch, capsys):
    def fail():
        raise made(kind)

    monkeypatch.setattr(app_module, "app", fail)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == exit_code(made(kind)) == CODES.get(kind.__name__, 1)
    assert capsys.readouterr().err == f"baton: {kind.__name__}: {made(kind)}\n"


def test_an_overload_keeps_its_code_with_a_delay():
    assert exit_code(Overloaded("full", retry_after_s=3)) == 5


@pytest.mark.parametrize(
    ("raised", "code"),
    [(KeyboardInterrupt(), 130), (ModuleNotFoundError("no", name="ray"), "pip install 'baton-serve[server,local]'")],
)
def test_what_is_no_error_of_ours(raised, code, monkeypatch):
    def fail():
        raise raised

    monkeypatch.setattr(app_module, "app", fail)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code or str(code) in str(ended.value.code)


def run(*args):
    """The output of a Python with `args`, and the seconds of CPU that it took."""
    process = subprocess.Popen([sys.executable, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return output, used.ru_utime + used.ru_stime


def test_help_answers_in_less_than_half_a_second_of_cpu():
    output, cpu_s = run("-m", "baton", "--help")
    assert "doctor" in output
    assert cpu_s < 0.5


def test_help_needs_none_of_the_heavy_libraries():
    code = "import sys, baton.cli.app; print([name for name in sys.argv[1:] if name in sys.modules])"
    output, _ = run("-c", code, "torch", "ray", "grpc", "redis", "pydantic", "google.protobuf", "structlog")
    assert output == "[]\n"
