"""Command lines: exit codes, mistakes that are named before anything starts, and requests that commands send."""

import json
import shlex
import subprocess
import sys
from typing import Any
from unittest.mock import Mock, call

import psutil
import pytest
import typer
from typer.testing import CliRunner

from baton import __version__, errors
from baton.cli import app as app_module
from baton.cli.app import app
from baton.cli.cluster import demo, launch, operate
from baton.cli.cluster.launch import wait_ended
from baton.cli.examples import EXAMPLES, PANELS, epilog
from baton.cli.exit_codes import exit_code
from baton.cli.main import main
from baton.cluster import launcher
from baton.cluster.backend_process import StartError
from baton.config import RouterConfig
from baton.errors import BatonError, Cancelled, ConfigError, InvalidRequest, Violation
from baton.rpc.v1 import admin_pb2
from tests.support.cluster_process import FREE_PORTS
from tests.support.processes import fill_disk
from tests.support.waiting import eventually

CODES = {  # interfaces.md
    "InvalidRequest": 2, "UnknownModel": 2, "ConfigError": 3, "CheckpointError": 3, "LedgerError": 4, "NoWorker": 4,
    "Overloaded": 5, "RateLimited": 5, "PromiseRefused": 5, "Cancelled": 130,
}  # fmt: skip
UP = ["up", "-c", "configs/no-ray.yaml", *(f"--set={item}" for item in (*FREE_PORTS, "model.path=oracle"))]
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BatonError)]


def ended_by(error, monkeypatch):
    """Return the exit code of a command that raises this."""
    monkeypatch.setattr(app_module, "app", Mock(side_effect=error))
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.parametrize("kind", [*KINDS, StartError], ids=lambda kind: kind.__name__)
def test_every_error_has_its_exit_code_and_one_message(kind, monkeypatch, capsys):
    error = InvalidRequest(Violation("a", "b")) if kind is InvalidRequest else kind("because")
    assert ended_by(error, monkeypatch) == exit_code(error) == CODES.get(kind.__name__, 1)
    advice = "; commands take it from --token or BATON_TOKEN" if kind is errors.Unauthenticated else ""
    assert capsys.readouterr().err == f"baton: {kind.__name__}: {error}{advice}\n"


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (KeyboardInterrupt(), 130),
        (PermissionError(13, "Permission denied", "/other/state.json"), 3),
        (ModuleNotFoundError("no", name="ray"), "pip install 'baton-serve[server,local]'"),
    ],
)
def test_what_is_no_error_of_ours(raised, code, monkeypatch):
    ended = ended_by(raised, monkeypatch)
    assert ended == code or str(code) in str(ended)


HELP = """
import atexit, gc, sys; from baton.cli.main import main
heavy, sys.argv = sys.argv[1:], ["baton", "--help"]
atexit.register(lambda: print([n for n in heavy if n in sys.modules], gc.isenabled(), gc.get_freeze_count() > 0))
main()
"""


def test_help_needs_none_of_the_heavy_libraries():
    heavy = ("torch", "ray", "grpc", "redis", "pydantic", "google.protobuf", "structlog")
    done = subprocess.run([sys.executable, "-c", HELP, *heavy], capture_output=True, text=True, check=True)
    assert "doctor" in done.stdout
    assert done.stdout.splitlines()[-1] == "[] True True", "heavy ones; collections again; imports frozen"


def test_each_command_has_a_group_and_its_examples_are_valid():
    root: Any = typer.main.get_command(app)
    shown = [name for names in PANELS.values() for name in names]
    assert sorted(root.commands) == sorted(shown)
    assert {"config"} == set(shown) - set(EXAMPLES), "its own commands explain it"
    for name, lines in EXAMPLES.items():
        for line in lines:
            first, *words = shlex.split(line.partition(" <")[0])
            assert first == name
            with root.commands[name].make_context(name, words, resilient_parsing=False):
                assert f"baton {line}" in str(epilog(name))


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ("--version", 0, f"baton {__version__}"),
        ("serv x", 2, "Did you mean 'serve'?"),
        ("up --model org/m", 2, "baton serve org/m"),
        ("--show-completion", 0, "COMPLETE"),
        ("down --name none", 0, "cluster 'none' is not running"),
        ("down", 0, "no cluster is running"),
    ],
)
def test_what_newcomers_type(monkeypatch, tmp_path, words, code, text):
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    done = CliRunner().invoke(app, [*words.split(), *["bash"] * ("completion" in words)])
    assert (done.exit_code, text in " ".join(done.output.replace("│", " ").split())) == (code, True), done.output


@pytest.mark.parametrize("serving", [False, True])
def test_a_stop_promises_an_end_of_requests_only_where_there_may_be_some(serving):
    program = "import os, signal; from baton.cluster.signals import stop_on_signals; stop = stop_on_signals()\n"
    program += f"{'stop.serving.set()' if serving else ''}\nos.kill(os.getpid(), signal.SIGINT)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.startswith("stopping; running requests may finish" if serving else "stopping\n")


# --- up, demo and down

UNREAPED = "import subprocess, sys\nprint(subprocess.Popen([sys.executable, '-c', '']).pid, flush=True)\ninput()"


def test_a_zombie_has_ended_and_a_process_that_runs_on_is_returned():
    """The parent of a zombie has not read its exit code. The timeout of the first call is longer than a test."""
    command = [sys.executable, "-c", UNREAPED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        zombie = psutil.Process(int(parent.stdout.readline()))
        eventually(lambda: zombie.status() == psutil.STATUS_ZOMBIE)
        assert wait_ended([zombie], 3600.0) == []
        running = psutil.Process(parent.pid)
        assert wait_ended([zombie, running], 0.3) == [running]
        parent.communicate("\n")


@pytest.mark.parametrize("command", [["up"], ["up", "--detach"], ["demo"]], ids=" ".join)
def test_a_wrong_cpu_level_is_refused_before_anything_starts(monkeypatch, tmp_path, command):
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    monkeypatch.setenv("BATON_CPU_LEVEL", "avx9")
    monkeypatch.setattr(demo, "configure_logging", lambda *_: None)  # would change other tests' logs
    done = CliRunner().invoke(app, [*command, "-c", "configs/no-ray.yaml"])
    assert isinstance(done.exception, ConfigError), done.output
    allowed = "native, none, neon, avx2, avx-vnni, avx512, avx512-vnni, avx512-bf16"
    assert str(done.exception) == f"BATON_CPU_LEVEL (environment): must be one of {allowed}, got 'avx9'"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("detach", [[], ["--detach"]], ids=["foreground", "detached"])
def test_a_full_disk_ends_a_start_with_an_error(monkeypatch, tmp_path, detach):
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    monkeypatch.setattr(launch, "configure_logging", lambda *_: None)  # would change other tests' logs
    monkeypatch.setattr(launcher, "SupervisedRedis", None)  # must not be started
    fill_disk(monkeypatch)
    done = CliRunner().invoke(app, [*UP, *detach])
    assert isinstance(done.exception, ConfigError), done.output
    file = "cluster.yaml" if detach else "state.json"
    assert str(done.exception) == f"BATON_HOME: cannot write to {tmp_path}/no-ray/{file}: No space left on device"
    assert sorted(path.name for path in (tmp_path / "no-ray").iterdir()) == ["lock", "logs"]


def test_down_stops_a_cluster_whose_file_is_no_longer_valid(monkeypatch, tmp_path):
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    supervisor, waited = Mock(), []
    state = Mock(supervisor=supervisor, processes={})
    state.name = "n"
    monkeypatch.setattr(launch, "running_clusters", lambda **_: [state])
    monkeypatch.setattr(launch, "find_cluster", lambda *_, **__: state)

    def wait_ended(left, within_s):
        waited.append((left, within_s))
        return []

    monkeypatch.setattr(launch, "wait_ended", wait_ended)
    (tmp_path / "n").mkdir()
    (tmp_path / "n" / "cluster.yaml").write_text("key_of_another_version: 1\n")
    done = CliRunner().invoke(app, ["down"])
    assert (done.exit_code, done.output) == (0, "cluster 'n' is down\n")
    supervisor.process().terminate.assert_called_once_with()
    assert waited[0] == ([supervisor.process()], RouterConfig().drain_s + launch.DOWN_S)


@pytest.mark.parametrize("error", [ConfigError("up ended with exit code 3"), Cancelled("stopped before it was done")])
def test_the_error_of_a_detached_process_without_output_is_reported_once(monkeypatch, tmp_path, error):
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    child = Mock()
    child.return_value.wait_ready.side_effect = error
    monkeypatch.setattr(launch, "Child", child)
    done = CliRunner().invoke(app, [*UP, "--detach"])
    if isinstance(error, ConfigError):
        assert done.exit_code == 3
        assert done.stderr.endswith("\nbaton: ConfigError: up ended with exit code 3\n")
    else:
        assert done.exception is error
        assert "stop" not in done.stderr


# --- scale, drain and restart; tests/integration/test_board.py has their requests to a router


@pytest.fixture
def operator(monkeypatch):
    """Replaces the operator that commands find."""
    made = Mock()
    made.scale.side_effect = lambda sizes: admin_pb2.Plan(**{"prefill": 7, "decode": 8, **sizes}, number=3)
    made.restart.return_value = admin_pb2.Plan(generation=5, number=4)
    made.drain.return_value = "prefill-0@1.2"
    monkeypatch.setattr(operate, "_operator", lambda *_: made)
    return made


def run(words):
    return CliRunner().invoke(app, [*words.split(), "--target", "127.0.0.1:1"])


@pytest.mark.parametrize("words", ["", "prefill", "prefill=x", "prefill=-1", "router=2", "decode=1 decode=2", "=1"])
def test_what_is_no_size_is_named_and_nobody_is_asked(operator, words):
    result = run(f"scale {words}")
    assert result.exit_code == 2
    assert "prefill=N" in result.output or not words
    assert operator.mock_calls == []


def test_sizes_are_said_and_waiting_is_asked_for(operator):
    result = run("scale decode=3 prefill=1")
    assert (result.exit_code, "baton status" in result.output) == (0, True)
    assert json.loads(run("scale prefill=2 --wait 30 --json").output) == {"prefill": 2, "decode": 8, "done": True}
    assert "prefill-0@1.2 drains: done" in run("drain prefill-0 --wait 5").output
    assert json.loads(run("restart --json").output) == {"generation": 5, "done": False}
    assert operator.mock_calls == [
        call.scale({"decode": 3, "prefill": 1}),
        *(call.scale({"prefill": 2}), call.wait_settled(3, 30.0)),
        *(call.drain("prefill-0"), call.wait_gone("prefill-0@1.2", 5.0)),
        call.restart(),
    ]
