"""A cluster with TLS and tokens, as a user starts it: every listener of its processes, its logs, and its Redis."""

import json
import subprocess
from pathlib import Path

import pytest
import redis
from grpc import StatusCode

from baton import Client, errors
from baton.cli.setup.certs import certs
from baton.core import Role
from baton.ledger.embedded_redis import EmbeddedRedis
from baton.ledger.redis_client import COMMANDS
from baton.receipts.form import with_prompt
from baton.rpc.channel import Wire
from tests.integration.access_support import TOKENS, WRONG_TOKEN, ask, bearer, methods_of, token_file
from tests.support.cluster_process import HANDED_OVER
from tests.support.load import read
from tests.support.time_factor import scaled
from tests.support.waiting import eventually, until_interrupted

pytestmark = pytest.mark.slow
PROMPT = "zebra-quartz-7781"
ENDS = ("_finished", "_pushed", "_aborted")  # of the last events of a request in each process


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("security")
    certs(folder / "tls", [], 30)
    certs(folder / "other", [], 30)
    token_file(folder / "tokens.yaml")
    make = ("openssl", "genpkey", "-algorithm", "ed25519", "-out", folder / "receipt.pem")
    subprocess.run(make, check=True, capture_output=True)
    (folder / "receipt.pem").chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def cluster(module_home, files):
    keys = {"tls": "tls", "tokens": "tokens.yaml", "receipt_key": "receipt.pem"}
    sets = [f"security.{key}={files / name}" for key, name in keys.items()]
    rest = ("transfer.transport=grpc", "router.queue.max_wait_s=60", "log.level=debug")
    with module_home.cluster("configs/no-ray.yaml", *sets, HANDED_OVER, "model.path=oracle", *rest) as running:
        yield running


@pytest.fixture
def as_admin(monkeypatch):
    monkeypatch.setenv("BATON_TOKEN", TOKENS["admin"])


@pytest.fixture
def alice(cluster, files):
    with Client(
        cluster.state().grpc, token=TOKENS["alice"], tls=files / "tls" / "ca.pem", timeout=scaled(60.0)
    ) as client:
        yield client


def test_commands_bring_what_they_need(cluster, as_admin):
    workers = cluster.status()["workers"]
    assert [worker["state"] for worker in workers] == ["connected"] * len(workers)
    census = cluster.home.baton("status", "--census", "--name", cluster.name, check=True)
    assert len(census.stdout.splitlines()) == len(workers)
    said = cluster.home.baton("generate", PROMPT, "--max-tokens", "4", "--name", cluster.name, "--json", check=True)
    assert json.loads(said.stdout)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("role", list(Role))
def test_every_method_of_a_worker(cluster, files, role):
    """A certificate of the cluster's CA is required and sufficient."""
    mine, other = Wire.of_path(files / "tls"), Wire.of_path(files / "other")
    with Client("127.0.0.1:1", admin=cluster.state().admin, token=TOKENS["admin"], tls=files / "tls") as client:
        infos = [worker.info for worker in client.cluster().workers]
    address = next(info.ref.address for info in infos if info.role == role)
    refused = (Wire(), Wire(other.ca), Wire(mine.ca), Wire(mine.ca, other.cert, other.key))
    for method in methods_of("worker"):
        with mine.sync(address) as channel:
            assert ask(channel, method).reached, method
        for wire in refused:
            with wire.sync(address) as channel:
                assert ask(channel, method, bearer("admin")).code is StatusCode.UNAVAILABLE, method


def test_no_secret_is_anywhere(cluster, files, alice, as_admin):
    """No log, state or command line has a secret after all accepted and rejected requests here."""
    alice.tokenize(PROMPT)
    answer = alice.generate(PROMPT, max_tokens=4)
    wrong_schema = {"json_schema": {"type": PROMPT}}
    for wrong in ({"model": PROMPT[:5]}, {"max_tokens": 10**6}, {"stop": [PROMPT * 20]}, wrong_schema):
        with pytest.raises(errors.BatonError):
            alice.generate(PROMPT, **wrong)
    client = Client(cluster.state().grpc, token=WRONG_TOKEN, tls=files / "tls", timeout=scaled(60.0))
    with client, pytest.raises(errors.Unauthenticated):
        client.generate(PROMPT)
    secrets = [*TOKENS.values(), WRONG_TOKEN, PROMPT, (files / "tls" / "key.pem").read_text().splitlines()[1]]
    config = cluster.home.path / cluster.name / "cluster.yaml"
    shown = cluster.home.baton("config", "show", config, check=True).stdout
    texts = {str(file): file.read_text(errors="replace") for file in cluster.home.path.rglob("*") if file.is_file()}
    lines = [line for text in texts.values() for line in text.splitlines() if '"request_finished"' in line]
    tenants = {found["request_id"]: found["tenant"] for found in map(json.loads, lines)}
    assert tenants[answer.request_id] == "alice"
    for name, identity in cluster.processes().items():
        texts[f"command line of {name}"] = Path(f"/proc/{identity.pid}/cmdline").read_text()
    for place, text in {**texts, "config show": shown}.items():
        for secret in secrets:
            assert secret not in text, f"{secret} is in {place}"


def test_the_life_of_a_request_is_in_the_logs(cluster, alice):
    """The log lines of all processes, ordered by time, have each step once. KV is sent over gRPC with TLS."""
    answer = alice.generate(PROMPT, max_tokens=4, temperature=0)
    assert (len(answer.tokens), answer.placement.transport) == (4, "grpc")
    request_id = answer.request_id

    def ended():
        """Return the lines when all processes have written theirs, which the answer does not wait for."""
        said = cluster.home.baton("logs", "--name", cluster.name, "--request", request_id, check=True).stdout
        lines = [json.loads(line) for line in said.splitlines()]
        ends = {line["process"].partition("-")[0] for line in lines if line["event"].endswith(ENDS)}
        return lines if ends == {"router", "prefill", "decode"} else None

    lines = eventually(ended, "each process's last line", within_s=60)
    assert {line["request_id"] for line in lines} == {request_id}
    assert sorted(line["timestamp"] for line in lines) == [line["timestamp"] for line in lines]
    steps = {(line["process"].partition("-")[0], line["event"].partition("_")[2]) for line in lines}
    assert len(steps) == len(lines)
    # If the stream ends before its prefill worker has read the commit, the push is aborted. Either may come first.
    assert len(steps & {("prefill", "pushed"), ("prefill", "aborted")}) == 1
    assert steps - {("prefill", "pushed"), ("prefill", "aborted")} == {
        *(("router", step) for step in ("arrived", "attempted", "accepted", "first_token", "finished")),
        ("prefill", "prefill"),
        *(("decode", step) for step in ("reserved", "offered", "committed", "finished")),
    }
    whole = cluster.home.baton("logs", "--name", cluster.name, "--since", "1h", check=True).stdout.splitlines()
    processes = {json.loads(line)["process"] for line in whole}
    assert processes == {"supervisor", "redis", "router", "prefill-0", "decode-0"}


# --- an external Redis: only its URL, a user limited to our keys, and the keys that remain in it


def test_a_limited_user_is_enough_and_every_key_expires(home, tmp_path):
    with EmbeddedRedis.start(tmp_path / "redis") as server, redis.Redis.from_url(server.url) as admin:
        may = {"categories": ["-@all", "+@connection"], "commands": [f"+{name}" for name in COMMANDS]}
        admin.acl_setuser("baton", enabled=True, passwords=["+s3cret"], keys=["baton:no-ray:*"], **may)
        url = f"redis://baton:s3cret@127.0.0.1:{server.port}/0"
        with home.cluster("configs/no-ray.yaml", "model.path=oracle", f"redis.url={url}") as cluster:
            with cluster.client() as client:
                request = client.generate("hello", max_tokens=20, temperature=0, ignore_eos=True).request_id
            row = f"baton:no-ray:req:{request}"
            record = eventually(lambda: (found := admin.hgetall(row)).get(b"worker") == b"decode-0" and found)
            assert record
            assert "redis" not in cluster.state().processes
        assert b"s3cret" not in b"".join(file.read_bytes() for file in home.path.glob("*/logs/*"))
        left = {key: admin.ttl(key) for key in admin.keys("*")}
        lasting = {key for key, ttl in left.items() if ttl < 0}
        assert lasting <= {b"baton:no-ray:epoch", b"baton:no-ray:counter"}, left


def test_a_receipt_of_an_answer_that_outlived_its_decode_worker_is_equal_on_replay(cluster, alice, as_admin, tmp_path):
    """The command takes TLS, token and public key from the local cluster."""
    answers = []
    long = {"max_tokens": 1500, "temperature": 0.8, "ignore_eos": True, "receipt": True}

    def attempt():
        with alice.stream(PROMPT, **long) as stream:
            read(stream, 20)
            pid = cluster.kill("decode-0")
            answers.append(stream.collect())
        cluster.wait_replaced("decode-0", pid)
        return answers[-1].placement.attempts > 1

    until_interrupted(attempt)
    file = tmp_path / "receipt.json"
    file.write_text(with_prompt(answers[-1].receipt, alice.tokenize(PROMPT)))
    done = cluster.home.baton("replay", file, "--name", cluster.name)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{file}: equal\n", "")
    changed = json.loads(file.read_text())
    changed["sampling"]["temperature"] = "0.7"
    file.write_text(json.dumps(changed))
    done = cluster.home.baton("replay", file, "--name", cluster.name)
    assert (done.returncode, "receipt.signature" in done.stdout) == (2, True)
