"""Errors become exit codes, in one place; `baton --help` costs next to nothing."""

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


def ended_by(error, monkeypatch):
    """The exit code of a command that raises this."""

    def fail():
        raise error

    monkeypatch.setattr(app_module, "app", fail)
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.parametrize("kind", [*KINDS, StartError], ids=lambda kind: kind.__name__)
def test_every_error_has_its_exit_code_and_one_message(kind, monkeypatch, capsys):
    assert ended_by(made(kind), monkeypatch) == exit_code(made(kind)) == CODES.get(kind.__name__, 1)
    assert capsys.readouterr().err == f"baton: {kind.__name__}: {made(kind)}\n"


@pytest.mark.parametrize(
    ("raised", "code"),
    [(KeyboardInterrupt(), 130), (ModuleNotFoundError("no", name="ray"), "pip install 'baton-serve[server,local]'")],
)
def test_what_is_no_error_of_ours(raised, code, monkeypatch):
    ended = ended_by(raised, monkeypatch)
    assert ended == code or str(code) in str(ended)


def test_an_overload_keeps_its_code_with_a_delay():
    assert exit_code(Overloaded("full", retry_after_s=3)) == 5


HELP = """
import sys
from baton.cli.app import app
app(["--help"], standalone_mode=False)
print([name for name in sys.argv[1:] if name in sys.modules])
"""


def test_help_needs_none_of_the_heavy_libraries():
    heavy = ("torch", "ray", "grpc", "redis", "pydantic", "google.protobuf", "structlog")
    done = subprocess.run([sys.executable, "-c", HELP, *heavy], capture_output=True, text=True, check=True)
    assert "doctor" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
