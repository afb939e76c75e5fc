"""A new user's mistakes: each gives a clear message and the right exit code, and leaves nothing."""

import os
import signal
import socket
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from tests.support.cluster_process import ROOT, Home
from tests.support.time_factor import scaled
from tests.support.waiting import eventually, until_interrupted

pytestmark = pytest.mark.slow
CONFIG = "configs/no-ray.yaml"
ORACLE = ("--set", "model.path=oracle")
PORTS = tuple(part for name in ("grpc", "metrics", "http") for part in ("--set", f"router.{name}=127.0.0.1:0"))
UP = ("up", "-c", CONFIG, *PORTS)
READY = "from baton import Client"  # in the output of `baton up` when all serve
NOWHERE = ("--set", "redis.url=redis://:s3cret@127.0.0.1:1/0")
MISTAKES: dict[tuple[str, ...], tuple[int, list[str]]] = {
    ("up", "-c", "nowhere.yaml"): (3, ["nowhere.yaml", "cannot be read"]),
    (*UP, *ORACLE, "--set", "decode.kv_memory=64KiB"): (3, ["kv_memory", "max_model_len"]),
    (*UP, "--detach", "--set", "model.path=hf:org/tiny"): (3, ["model.path: hf:org/tiny: not in the cache"]),
    ("prefill-worker", "-c", CONFIG, *ORACLE, *NOWHERE, "--set", "mode=colocated"): (
        3,
        ["mode: colocated has no prefill"],
    ),
    ("gateway", "-c", CONFIG, *ORACLE, "--set", "router.http=null"): (3, ["router.http: must be set"]),
    ("generate", "hi"): (4, ["no cluster is running", "baton up"]),
    ("down",): (0, ["no cluster is running"]),
    ("generate", "hi", "--target", "127.0.0.1:1", "--timeout", "3"): (4, ["127.0.0.1:1"]),
    ("generate",): (2, ["PROMPT"]),
}
some = pytest.mark.sample(2, of="what `baton up` rejects in the foreground and detached")
detached_or_not = pytest.mark.parametrize("detach", [(), ("--detach",)], ids=["foreground", "detached"])


def refused(home, *args, code, says, **options):
    done = home.baton(*args, **options)
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    for part in says:
        assert part in output, output
    assert "Traceback" not in output
    eventually(lambda: not home.processes())
    return output


@pytest.mark.sample(4)
@pytest.mark.parametrize("args", MISTAKES, ids=lambda args: " ".join(args).replace(" ".join(UP), "up"))
def test_a_mistake_is_named(home, monkeypatch, args):
    monkeypatch.setenv("HF_HOME", str(home.path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, says = MISTAKES[args]
    refused(home, *args, code=code, says=says)
    assert not list(home.path.glob("*/state.json"))


@pytest.mark.parametrize("words", ["", "--here", "decode-0 --here -c x.yaml", "decode-0 -c x.yaml"])
def test_a_drain_is_of_one_worker_or_of_this_host(words):
    done = CliRunner().invoke(app, ["drain", *words.split()])
    assert done.exit_code == 2
    assert "--here -c FILE" in done.output


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("key", "detach"),
    [("router.grpc", ()), ("router.metrics", ()), ("router.http", ()), ("router.grpc", ("--detach",))],
)
def test_a_port_in_use_is_named(home, key, detach):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = f"127.0.0.1:{listener.getsockname()[1]}"
        refused(home, *UP, *ORACLE, "--set", f"{key}={taken}", *detach, code=3, says=[taken, "in use"])


@some
@detached_or_not
def test_an_unreachable_redis_is_named_without_its_password(home, detach):
    says = ["LedgerError", "127.0.0.1:1", "Connect call failed"]
    assert "s3cret" not in refused(home, *UP, *ORACLE, *NOWHERE, *detach, code=4, says=says)


@some
@detached_or_not
def test_a_ray_that_nobody_runs_is_named(home, detach):
    args = ("up", "-c", "configs/local.yaml", *ORACLE, *PORTS, "--set", "ray.address=127.0.0.1:1", *detach)
    refused(home, *args, code=4, says=["ray.address", "127.0.0.1:1"])


@some
@detached_or_not
def test_a_home_that_is_no_folder(tmp_path, detach):
    (tmp_path / "file").touch()
    refused(Home(tmp_path / "file"), *UP, *ORACLE, *detach, code=3, says=["BATON_HOME: cannot write"])


def test_a_folder_that_is_no_checkpoint_is_named(home, tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tokenizer.json").write_bytes((ROOT / "models/demo/tokenizer.json").read_bytes())
    refused(home, *UP, "--set", f"model.path={tmp_path / 'weights'}", code=3, says=["weights", "has no config.json"])


def starting(home, config, *options, number=signal.SIGTERM):
    """Start `baton up` and return it while its workers load, with its folder. It obeys the signal even under nohup."""
    name = Path(config).stem
    process = home.start("up", "-c", config, *ORACLE, *PORTS, *options, heeds=number)
    first = home.path / name / ("scratch" if name == "local" else "logs/prefill-0.log")
    for path in (home.path / name / "state.json", first):
        eventually(lambda path=path: os.path.lexists(path) or process.poll() is not None, path, within_s=60)
    assert not process.poll(), process.stdout.read()
    return process, home.path / name


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("config", "detach", "number"),
    [
        (CONFIG, (), signal.SIGINT),
        (CONFIG, (), signal.SIGTERM),
        (CONFIG, (), signal.SIGHUP),
        (CONFIG, ("--detach",), signal.SIGTERM),
        ("configs/local.yaml", (), signal.SIGINT),
    ],
    ids=["plain-INT", "plain-TERM", "plain-HUP", "detached", "ray"],
)
def test_a_signal_while_workers_load_leaves_nothing(home, config, detach, number):
    def attempt():
        process, folder = starting(home, config, *detach, number=number)
        scratch = folder / "scratch"
        temporary = scratch.readlink() if scratch.is_symlink() else Path("/nonexistent")
        process.send_signal(number)
        output, _ = process.communicate(timeout=scaled(150))  # a Ray that is starting is waited for
        if READY in output:  # the signal came too late
            home.baton("down", check=True)
            return False
        assert process.returncode == 130, output
        assert "Traceback" not in output
        eventually(lambda: not home.processes())
        assert not temporary.exists()
        assert {path.name for path in folder.iterdir()} <= {"lock", "logs", "up.out"}
        return True

    until_interrupted(attempt)


def test_down_while_it_starts(home):
    process, _ = starting(home, CONFIG)
    asked = home.baton("generate", "hi")
    if asked.returncode:  # otherwise it was already ready
        assert "still starting" in asked.stderr
    assert "is down" in home.baton("down", check=True).stdout
    output, _ = process.communicate(timeout=scaled(60))
    assert process.returncode in {0, 130}, output
    eventually(lambda: not home.processes())


def test_config_commands(home):
    assert "ok" in home.baton("config", "validate", CONFIG, check=True).stdout
    shown = home.baton("config", "show", CONFIG, "--set", "redis.url=redis://u:s3cret@h:1/0", check=True).stdout
    assert "redis://u:***@h:1/0" in shown
    assert "s3cret" not in shown
    assert '"properties"' in home.baton("config", "schema", check=True).stdout


@pytest.mark.xdist_group("oracle")
def test_two_clusters_of_one_name(oracle_cluster):
    home = oracle_cluster.home
    output = home.path / "no-ray" / "up.out"
    said = output.read_text()
    for detach in ((), ("--detach",)):
        done = home.baton(*UP, *ORACLE, *detach)
        assert done.returncode == 3
        assert "a cluster named 'no-ray' is running" in done.stderr
    assert said
    assert output.read_text() == said


@pytest.mark.xdist_group("oracle")
def test_overrides_are_not_on_the_command_line_of_what_stays(oracle_cluster):
    """Overrides may contain a password, and all users of the machine can read command lines."""
    state = oracle_cluster.state()
    for identity in (state.supervisor, *state.processes.values()):
        assert "oracle" not in " ".join(psutil.Process(identity.pid).cmdline())
