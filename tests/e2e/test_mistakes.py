"""What a new user gets wrong: each a clear message, the right exit code, nothing left behind."""

import os
import signal
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.cluster_process import ROOT, Home
from tests.support.time_factor import scaled
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
CONFIG = "configs/no-ray.yaml"
ORACLE = ("--set", "model.path=oracle")
PORTS = tuple(part for name in ("grpc", "metrics", "http") for part in ("--set", f"router.{name}=127.0.0.1:0"))


def refused(home, *args, code, says, **options):
    done = home.baton(*args, **options)
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    for part in says:
        assert part in output, output
    assert "Traceback" not in output
    assert home.processes() == []


@pytest.mark.parametrize("detach", [(), ("--detach",)], ids=["foreground", "detached"])
@pytest.mark.parametrize(
    ("item", "says"),
    [
        ("decode.replics=2", ["decode.replics", "unknown key", "decode.replicas"]),
        ("model.path=no/such/folder", ["model.path", "no/such/folder"]),
        ("router.grpc=0.0.0.0:0", ["router.grpc", "allow_insecure"]),
    ],
)
def test_a_wrong_key_is_a_config_error(home, item, says, detach):
    refused(home, "up", "-c", CONFIG, *ORACLE, "--set", item, *detach, code=3, says=says)


def test_a_colocated_cluster_takes_no_prefill_worker(home):
    sets = ("--set", "mode=colocated", "--set", "redis.url=redis://127.0.0.1:1/0")
    refused(home, "prefill-worker", "-c", CONFIG, *ORACLE, *sets, code=3, says=["mode: colocated has no prefill"])


def test_a_missing_file_is_a_config_error(home):
    refused(home, "up", "-c", "nowhere.yaml", code=3, says=["nowhere.yaml", "cannot be read"])


@pytest.mark.parametrize("detach", [(), ("--detach",)], ids=["foreground", "detached"])
@pytest.mark.parametrize("key", ["router.grpc", "router.metrics", "router.http"])
def test_a_port_in_use_is_named(home, key, detach):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        args = ("up", "-c", CONFIG, *ORACLE, *PORTS, "--set", f"{key}={address}", *detach)
        refused(home, *args, code=3, says=[address, "in use"])


@pytest.mark.parametrize("detach", [(), ("--detach",)], ids=["foreground", "detached"])
def test_an_unreachable_redis_is_named_without_its_password(home, detach):
    args = ("up", "-c", CONFIG, *ORACLE, "--set", "redis.url=redis://:s3cret@127.0.0.1:1/0", *detach)
    refused(home, *args, code=4, says=["LedgerError", "127.0.0.1:1", "Connect call failed"])
    assert "s3cret" not in home.baton(*args).stderr


@pytest.mark.parametrize("detach", [(), ("--detach",)], ids=["foreground", "detached"])
def test_a_ray_that_nobody_runs_is_named(home, detach):
    args = ("up", "-c", "configs/local.yaml", *ORACLE, *PORTS, "--set", "ray.address=127.0.0.1:1", *detach)
    refused(home, *args, code=4, says=["ray.address", "127.0.0.1:1"])


@pytest.mark.parametrize("detach", [(), ("--detach",)], ids=["foreground", "detached"])
def test_a_home_that_is_no_folder(tmp_path, detach):
    (tmp_path / "file").touch()
    args = ("up", "-c", CONFIG, *ORACLE, *PORTS, *detach)
    refused(Home(tmp_path / "file"), *args, code=3, says=["BATON_HOME: cannot write"])


def test_keys_in_the_environment_are_not_laid_over_what_up_has_chosen(home, monkeypatch):
    monkeypatch.setenv("BATON__REDIS__URL", "embedded")
    monkeypatch.setenv("BATON__ROUTER__ADMIN", "127.0.0.1:0")
    with home.cluster(CONFIG, "model.path=oracle") as cluster:
        assert eventually(cluster.loads)


def starting(home, config, *options):
    """`baton up` while its workers load, and the name of its cluster."""
    name = Path(config).stem
    process = home.start("up", "-c", config, *ORACLE, *PORTS, *options)
    eventually((home.path / name / "state.json").exists, within_s=30)
    first = home.path / name / ("scratch" if name == "local" else "logs/prefill-0.log")
    eventually(lambda: os.path.lexists(first), within_s=30)
    return process, home.path / name


@contextmanager
def heard(number):
    """Also by a process that is started under nohup, which would inherit that the signal is ignored."""
    before = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("config", "detach"),
    [(CONFIG, ()), (CONFIG, ("--detach",)), ("configs/local.yaml", ())],
    ids=["plain", "detached", "ray"],
)
def test_a_signal_while_workers_load_leaves_nothing(home, config, detach, number):
    with heard(number):
        process, folder = starting(home, config, *detach)
    scratch = folder / "scratch"
    temporary = scratch.readlink() if scratch.is_symlink() else Path("/nonexistent")
    process.send_signal(number)
    output, _ = process.communicate(timeout=scaled(60))
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert home.processes() == []
    assert not temporary.exists()
    assert {path.name for path in folder.iterdir()} <= {"lock", "logs", "up.out"}


def test_down_while_it_starts(home):
    process, _ = starting(home, CONFIG)
    asked = home.baton("generate", "hi")
    if asked.returncode:  # else it was ready in the meantime
        assert "still starting" in asked.stderr
    assert "is down" in home.baton("down", check=True).stdout
    output, _ = process.communicate(timeout=scaled(30))
    assert process.returncode in {0, 130}, output
    assert home.processes() == []


@pytest.mark.xdist_group("oracle")
def test_a_prompt_that_is_no_text(oracle_cluster):
    done = oracle_cluster.home.start("generate", "-", stdin=subprocess.PIPE, errors="surrogateescape")
    output, _ = done.communicate("a\udcff", timeout=scaled(60))
    assert done.returncode == 2, output
    assert "InvalidRequest: prompt.text" in output


def test_a_folder_that_is_no_checkpoint_is_named(home, tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tokenizer.json").write_bytes((ROOT / "models/demo/tokenizer.json").read_bytes())
    args = ("up", "-c", CONFIG, *PORTS, "--set", f"model.path={tmp_path / 'weights'}")
    refused(home, *args, code=3, says=["weights/", ".json: no such file"])


def test_too_little_memory_for_one_sequence_is_named(home):
    args = ("up", "-c", CONFIG, *ORACLE, *PORTS, "--set", "decode.kv_memory=64KiB")
    refused(home, *args, code=3, says=["kv_memory", "max_model_len"])


@pytest.mark.parametrize("command", [("generate", "hi"), ("status",), ("down",)])
def test_no_cluster(home, command):
    refused(home, *command, code=4, says=["no cluster is running", "baton up"])


def test_a_target_where_nobody_listens(home):
    args = ("generate", "hi", "--target", "127.0.0.1:1", "--timeout", "3")
    refused(home, *args, code=4, says=["127.0.0.1:1"])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("generate",), "prompt"),
        (("nonsense",), "nonsense"),
        (("generate", "hi", "--max-tokens", "many"), "--max-tokens"),
        (("generate", "hi", "--target", "127.0.0.1:1", "--show", "colors"), "colors"),
    ],
)
def test_usage_errors(home, args, says):
    refused(home, *args, code=2, says=[says])


def test_config_commands(home):
    assert "ok" in home.baton("config", "validate", CONFIG, check=True).stdout
    shown = home.baton("config", "show", CONFIG, "--set", "redis.url=redis://u:s3cret@h:1/0", check=True).stdout
    assert "redis://u:***@h:1/0" in shown
    assert "s3cret" not in shown
    assert '"properties"' in home.baton("config", "schema", check=True).stdout


def test_doctor_says_what_is_wrong(home):
    done = home.baton("doctor", "-c", CONFIG, *ORACLE, *PORTS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "embedded" in done.stdout
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = home.baton("doctor", "-c", CONFIG, *ORACLE, "--set", f"router.grpc=127.0.0.1:{port}")
    assert done.returncode == 1
    assert "--set router.grpc=127.0.0.1:0" in done.stdout


@pytest.mark.xdist_group("oracle")
def test_two_clusters_of_one_name(oracle_cluster):
    home = oracle_cluster.home
    output = home.path / "no-ray" / "up.out"
    said = output.read_text()
    for detach in ((), ("--detach",)):
        done = home.baton("up", "-c", CONFIG, *ORACLE, *PORTS, *detach)
        assert done.returncode == 3
        assert "a cluster named 'no-ray' is running" in done.stderr
    assert said
    assert output.read_text() == said


@pytest.mark.xdist_group("oracle")
def test_overrides_are_not_on_the_command_line_of_what_stays(oracle_cluster):
    """They may hold a password, and everybody on the machine sees command lines."""
    state = oracle_cluster.state()
    for identity in (state.supervisor, *state.processes.values()):
        assert "oracle" not in " ".join(psutil.Process(identity.pid).cmdline())
