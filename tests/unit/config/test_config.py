"""The cluster file: defaults, layers of settings, security, and for each mistake an error with line, key and remedy."""

import subprocess
from operator import attrgetter
from shutil import copytree

import pytest
import yaml

from baton.cli.setup.certs import certs
from baton.config import config_from_json, load_config, located
from baton.config.schema import AUTO_PASS
from baton.core import Role
from baton.engine.determinism.shapes import FixedShapes
from baton.errors import ConfigError
from baton.worker.settings import from_config

POLICIES = ("predicted", "least_loaded", "prefix", "round_robin")
TRANSPORTS = ("auto", "nccl", "gloo", "shm", "cuda_ipc", "grpc")
HOSTS = ("10.0.0.5", "worker-0.pool.svc", "[fd00::5]")
SIZES = {"256MiB": 256 << 20, "1.5GiB": 3 << 29, "2GB": 2 * 10**9, "4096": 4096}


@pytest.fixture
def load(tmp_path):
    def load_text(text, *sets, env=None):
        file = tmp_path / "cluster.yaml"
        file.write_text(text)
        return load_config(file, sets, env)

    return load_text


def test_an_empty_file_is_a_working_local_cluster(load):
    config = load("", "model.path=oracle")
    assert (config.name, config.prefill.replicas, config.router.policy) == ("local", 1, "predicted")
    assert config.redis.url == "embedded"
    with pytest.raises(ValueError, match="frozen"):
        config.name = "other"


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        *[(f"router: {{policy: {policy}}}", "router.policy", policy) for policy in POLICIES],
        *[(f"transfer: {{transport: {name}}}", "transfer.transport", name) for name in TRANSPORTS],
        *[(f"prefill: {{advertise: '{host}'}}", "prefill.advertise", host) for host in HOSTS],
        *[(f"decode: {{kv_memory: {text}}}", "decode.kv_memory", size) for text, size in SIZES.items()],
        ("transfer: {frame_size: 1MiB, staging_memory: 64MiB}", "transfer.frame_size", 1 << 20),
        ("transfer: {staging_memory: 64MiB}", "transfer.staging_memory", 64 << 20),
        ("transfer: {coalesce_below: 8KiB}", "transfer.coalesce_below", 8 << 10),
        ("transfer: {verify: kv}", "transfer.verify", "kv"),
        ("prefill: {block_size: 8}\ndecode: {block_size: 32}", "prefill.block_size", 8),
        ("prefill: {block_size: 8}\ndecode: {block_size: 32}", "decode.block_size", 32),
        ("", "router.http", None),
        ("router: {http: '127.0.0.1:0'}", "router.http", "127.0.0.1:0"),
        ("router: {http_body: 2MiB}", "router.http_body", 2 << 20),
        ("", "retry.attempts", 3),
        ("retry: {attempts: 1}", "retry.attempts", 1),
    ],
)
def test_what_a_file_says_is_so(load, text, key, value):
    assert attrgetter(key)(load(f"model: {{path: oracle}}\n{text}")) == value


def test_later_layers_win_over_earlier_ones(load):
    text = "model: {path: oracle}\ndecode: {replicas: 2, max_running: 3, threads: 1}"
    env = {"BATON__DECODE__REPLICAS": "4", "BATON__DECODE__MAX_RUNNING": "5", "OTHER": "x"}
    config = load(text, "decode.replicas=6", env=env)
    assert (config.decode.replicas, config.decode.max_running, config.decode.threads) == (6, 5, 1)


WRONG = {
    "misspelt section": ("modle: {path: x}", ["line 1", "modle", "unknown key", "model"]),
    "misspelt key": ("decode:\n  max_runing: 5", ["line 2", "decode.max_runing", "did you mean decode.max_running"]),
    "key in the wrong section": ("max_running: 5", ["line 1", "max_running", "decode.max_running"]),
    "below the range": ("prefill: {replicas: 0}", ["prefill.replicas", "greater than 0", "colocated", "0"]),
    "not a size": ("prefill: {kv_memory: lots}", ["prefill.kv_memory", "256MiB", "lots"]),
    "no port": ("router: {grpc: localhost}", ["router.grpc", "host:port", "localhost"]),
    "port too high": ("router: {grpc: 'localhost:70000'}", ["router.grpc", "70000"]),
    "not a policy": ("router: {policy: random}", ["router.policy", "least_loaded", "random"]),
    "no time at all": ("slo: {itl_ms: 0}", ["line 1", "slo.itl_ms", "greater than 0"]),
    "bad name": ("name: Big Cluster", ["name", "Big Cluster"]),
    "redis scheme": ("redis: {url: 'http://x'}", ["redis.url", "redis://"]),
    "duplicate key": ("name: a\nname: b", ["line 2", "name", "duplicate"]),
    "not yaml": ("name: [", ["not YAML"]),
    "a list": ("- name", ["mapping", "list"]),
    "not a date": ("name: x\nmodel: 2001-99-99", ["line 2", "invalid value", "month"]),
    "not a bool": ("name: !!bool x", ["line 1", "invalid value"]),
    "a list as key": ("? [a]\n: b", ["line 1", "a key must be a string", "list"]),
    "no mapping": ("!!map [a]", ["not YAML"]),
    "in itself": ("redis: &a {b: *a}", ["contains itself"]),
    "a list in itself": ("name: &a [*a]", ["line 1", "name", "a list"]),
    "a date as key": ("slo: [{2001-01-01: x}]", ["line 1", "slo", "a list"]),
    "no end": ("slo: {ttft_ms: .inf}", ["line 1", "slo.ttft_ms", "1000000000"]),
    "more bytes than there are": (f"prefill: {{kv_memory: {'9' * 400}GB}}", ["prefill.kv_memory", "1024TiB"]),
    "a long folder": (f"model: {{path: {'a' * 5000}}}", ["model.path", "no folder"]),
    "python object": ("name: !!python/object/apply:os.system [id]", ["not YAML"]),
    "open HTTP listener": ("router: {http: '0.0.0.0:5'}", ["router.http", "allow_insecure"]),
    "not a size of a body": ("router: {http_body: 0}", ["router.http_body", "0"]),
    "lease too short": ("ledger: {lease_s: 1, heartbeat_s: 1}", ["ledger.lease_s", "three times"]),
    "section is a value": ("decode: 5", ["decode", "5"]),
    "not built yet": ("transfer: {transport: memory}", ["line 1", "transfer.transport", "memory", "not implemented"]),
    "a weight of nothing": ("router:\n  tenants: {team-a: 0}", ["line 2", "router.tenants.team-a", "0.001", "0"]),
    "nested without end": ("[" * 1000, ["not YAML", "nested"]),
    "more bytes than a float counts": (f"prefill: {{kv_memory: {'9' * 400}.0GiB}}", ["prefill.kv_memory", "1024TiB"]),
    "not a whole byte": ("prefill: {kv_memory: 0.1B}", ["prefill.kv_memory", "256MiB", "0.1B"]),
    "a port in other digits": ("router: {grpc: '127.0.0.1:\u0663'}", ["router.grpc", "host:port"]),
    "a lease for ever": ("ledger: {lease_s: .inf}", ["line 1", "ledger.lease_s", "less than or equal to 1000000"]),
    "a port to be called at": ("prefill: {advertise: 'worker:80'}", ["line 1", "prefill.advertise", "without a port"]),
    "an address to be called at": ("decode: {advertise: '::1'}", ["decode.advertise", "[::1]"]),
    "no address to connect to": ("decode: {advertise: ''}", ["decode.advertise", "without a port"]),
    "a URL to be called at": ("decode: {advertise: 'http://worker'}", ["decode.advertise", "without a port"]),
    "no room for a channel": ("transfer: {frame_size: 1GiB}", ["transfer.staging_memory", str(4 << 30), str(1 << 30)]),
    "not a kind of check": ("transfer: {verify: all}", ["transfer.verify", "frames", "kv", "all"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_named(load, case):
    text, expected = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        load(text)
    for part in ("cluster.yaml", *expected):
        assert part in str(caught.value)


def test_pools_may_share_what_is_written_once(load):
    text = "prefill: &pool {replicas: 3, max_running: 7}\ndecode: {<<: *pool, max_running: 9}"
    config = load(text)
    assert (config.prefill.replicas, config.prefill.max_running) == (3, 7)
    assert (config.decode.replicas, config.decode.max_running) == (3, 9)
    with pytest.raises(ConfigError, match="line 2: max_running: duplicate key"):
        load(text.replace("9}", "9, max_running: 9}"))
    deeper = "slo: {<<: [&a {itl_ms: 1}, &b {<<: *a, itl_ms: 2}]}\nprefill: {<<: {threads: 1}}"
    assert load(deeper).slo.itl_ms == 1


def test_an_ipv6_address_needs_no_quotes_on_a_command_line(load):
    assert load("name: a", "router.grpc=[::1]:50051").router.grpc == "[::1]:50051"


@pytest.mark.parametrize(
    ("text", "sets"),
    [
        ("redis: {url: 'http://me:s3cret@host'}", ()),
        ("redis: redis://me:s3cret@host", ()),
        ("redis: [redis://me:s3cret@host]", ()),
        ("name: a", ["redis=redis://me:s3cret@host"]),
        ("name: a", ["redis=[redis://me:s3cret@host]"]),
    ],
)
def test_a_redis_url_that_is_wrong_or_in_the_wrong_place_is_not_repeated(load, text, sets):
    with pytest.raises(ConfigError, match=r"redis(\.url)?: ") as caught:
        load(text, *sets)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("text", ['"redis://:s3cret@h', "!!int s3cret"])
def test_a_password_that_is_no_yaml_is_not_shown(tmp_path, text):
    (tmp_path / "c.yaml").write_text("name: x")
    with pytest.raises(ConfigError, match=r"BATON__REDIS__URL: .*YAML") as caught:
        load_config(tmp_path / "c.yaml", env={"BATON__REDIS__URL": text})
    assert "s3" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("https://App.Example", "https://app.example"),
        ("https://a.example:443", "https://a.example"),
        ("http://a.example:80", "http://a.example"),
        ("http://a.example:443", "http://a.example:443"),
    ],
)
def test_origins_are_compared_as_browsers_send_them(load, given, sent):
    assert load(f"router: {{http_origins: ['{given}']}}").router.http_origins == (sent,)
    with pytest.raises(ConfigError, match=r"router.http_origins.0: .*65535"):
        load("router: {http_origins: ['http://a.example:65536']}")


def test_all_mistakes_are_named_at_once(load):
    with pytest.raises(ConfigError) as caught:
        load("decode: {replicas: 0}\nprefill: {threads: -1}\nfoo: 1")
    assert len(str(caught.value).splitlines()) >= 3


@pytest.mark.parametrize("item", ["decode.replicas", "=3", "decode=3", "name=2001-99-99", "name=!!float x"])
def test_a_bad_set_is_named(load, item):
    with pytest.raises(ConfigError, match=item.partition("=")[0] or "--set"):
        load("decode: {threads: 1}", item)


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ("decode.replicas=-1", "decode.replicas: input should be greater than 0, got -1"),
        ("decode.threads=-1", "decode.threads: input should be greater than 0 or 'auto', got -1"),
        ("model.served_name=[]", "model.served_name: input should have at least 1 item, got []"),
        ("model.served_name=5", "model.served_name: input should be a valid string or a valid list, got 5"),
        ('model.served_name=["a b"]', "model.served_name.0: string should match pattern"),
        ('model.served_name=["a",5]', "model.served_name.1: input should be a valid string, got 5"),
        ("model.served_name=a b", "model.served_name: string should match pattern '^[!-~]{1,128}$', got \"a b\""),
        ("decode.block_size=a", "decode.block_size: input should be a valid integer or 'auto', got \"a\""),
        ("decode.kind=a", "decode.kind: unknown key"),
        ("ledger.heartbeat_s=9", "ledger.lease_s: must be at least three times ledger.heartbeat_s (9), got 10"),
        ("decode.node_labels.rack=a", "decode.node_labels: is only allowed if ray.address is that of a Ray cluster"),
        ("router.grpc=0.0.0.0:1", "router.grpc (0.0.0.0:1): listens beyond this machine"),
        ("prefill.autoscale.min=5", "prefill.autoscale: min: must not be above max (1), got 5"),
    ],
)
def test_a_mistake_of_a_set_is_blamed_on_it_and_named_once(load, item, text):
    with pytest.raises(ConfigError) as caught:
        load("decode: {threads: 1}\nledger: {lease_s: 10}", item, "name=x")
    assert str(caught.value).startswith(f"--set {item}: {text}")
    assert len(str(caught.value).splitlines()) == 1


def test_a_mistake_that_a_later_step_finds_has_its_place_too(tmp_path):
    """So has that of a started worker, whose output is indented. Other lines stay as they are."""
    file = tmp_path / "cluster.yaml"
    file.write_text("decode: {replicas: 1}\nredis: {url: embedded}\n")
    worker = "    baton: ConfigError: BATON__X: decode.kv_memory: too few"
    with pytest.raises(ConfigError) as caught, located(file, ["decode.kv_memory=1KiB"], {}):
        raise ConfigError(f"decode.replicas: too many\n{worker}\nredis.url: gone\nnote: x")
    assert str(caught.value).splitlines() == [
        f"{file}: line 1: decode.replicas: too many",
        "    baton: ConfigError: --set decode.kv_memory=1KiB: decode.kv_memory: too few",
        f"{file}: line 2: redis.url: gone",
        "note: x",
    ]


def test_a_model_is_found_beside_the_file_and_what_is_missing_is_named(load, tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match=r"model\.path: no folder 'no/such'"):
        load("model: {path: no/such}")
    (tmp_path / "weights").mkdir()
    assert load("model: {path: weights}").model.path == str((tmp_path / "weights").resolve())


def test_clients_name_the_model_as_it_was_given(load, tmp_path):
    (tmp_path / "0123abc").mkdir()
    (tmp_path / "tiny").symlink_to("0123abc")
    for given in (
        "tiny",
        f"{tmp_path}/tiny",
        f"{tmp_path}/tiny/",
        "./tiny",
        "../" + tmp_path.name + "/0123abc/../tiny",
    ):
        name = "0123abc" if ".." in given else "tiny"
        assert load(f"model: {{path: '{given}'}}").model.names == (name,), given
    for served in ("gpt-4", "org/x:1"):
        assert load(f"model: {{path: tiny, served_name: '{served}'}}").model.names == (served,)
    both = load("model: {path: tiny}", "model.served_name=[small, gpt-4]").model
    assert (both.name, both.names) == ("small", ("small", "gpt-4"))
    for wrong in ("[]", "''", "'a b'", "[ä]", "3"):
        with pytest.raises(ConfigError, match="served_name"):
            load(f"model: {{path: tiny, served_name: {wrong}}}")


@pytest.mark.parametrize(
    ("path", "name"),
    [("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"), ("org/tiny@refs/pr/1", "org/tiny"), ("org/tiny@v1.0", "org/tiny")],
)
def test_models_of_the_hub(load, path, name):
    for config in (load(f"model: {{path: 'hf:{path}'}}"), load("", f"model.path=hf:{path}")):
        assert (config.model.path, config.model.name) == (f"hf:{path}", name)


@pytest.mark.parametrize(
    "path", ["hf:", "hf:tiny", "hf:a/b/c", "hf:../b", "hf:a/..", "hf:a/b@", "hf:a/b@../c", "hf:a/-b"]
)
def test_a_name_that_the_hub_cannot_have_is_refused(load, path):
    with pytest.raises(ConfigError, match=r"line 1: model\.path: must be hf:org/name or .*such as hf:.*, got \"hf:"):
        load(f"model: {{path: '{path}'}}")


def test_the_shape_of_a_verify_pass(load):
    given = load("model: {path: oracle}\ndeterminism: {rows: 4, window: 8}").determinism.model_dump()
    assert given == {"rows": 4, "window": 8, "verify": "auto"}
    auto, shapes = load("model: {path: oracle}").determinism, FixedShapes()
    assert (auto.rows, auto.window) == ("auto", "auto")
    assert (shapes.rows, shapes.tokens) == AUTO_PASS  # config must not import the engine


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{rows: 3, window: 5}", r"line 2: determinism: rows times window must be a multiple of 32, got 3 x 5"),
        ("{window: 5}", r"line 2: determinism: rows times window must be a multiple of 32, got 2 x 5"),
        ("{rows: 0}", r"line 2: determinism\.rows: .*greater than or equal to 1 or 'auto', got 0"),
        ("{window: 1}", r"line 2: determinism\.window: .*greater than or equal to 2 or 'auto', got 1"),
        ("{verify: never}", r"line 2: determinism\.verify: .*'auto' or 'always', got \"never\""),
        ("{window: wide}", r"line 2: determinism\.window: .*'auto', got \"wide\""),
    ],
)
def test_a_verify_pass_of_another_shape_is_refused(load, given, said):
    with pytest.raises(ConfigError, match=said):
        load(f"model: {{path: oracle}}\ndeterminism: {given}")


# --- mode: colocated: all workers of both pools are decode workers; only the size of the prefill pool counts

TWO_POOLS = """
model: {path: oracle}
prefill: {replicas: 3, threads: 4, max_running: 7, kv_memory: 1GiB}
decode: {replicas: 2, threads: 1, max_batched_tokens: 96}
"""


def test_as_many_workers_as_both_pools_have_all_as_decode_says(load):
    apart, config = load(TWO_POOLS), load(TWO_POOLS, "mode=colocated")
    assert (config.prefill.replicas, config.decode.replicas) == (0, 5)
    assert config.decode == apart.decode.model_copy(update={"replicas": 5})
    assert (config.prefill.threads, config.prefill.max_running) == (1, 64), "a refused value has no effect"
    assert (apart.by_mode(), set(apart.bounds)) == (apart, set(Role)), "otherwise nothing changes"


def test_what_was_loaded_is_loaded_again_as_it_is(load):
    """The supervisor writes it into the state folder, and a controller elsewhere gets it as JSON."""
    config = load(TWO_POOLS, "mode=colocated", "decode.autoscale.max=4")
    assert load(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True))) == config
    assert config_from_json(config.model_dump_json()) == config


def test_where_the_other_pool_listens_is_nobodys_business(load):
    """A reload accepts the file too, although the prefill pool then has the listeners of the decode pool."""
    open_ = ["decode.listen=0.0.0.0:0", "decode.metrics=0.0.0.0:9101", "prefill.listen=0.0.0.0:1"]
    allowed = "security.allow_insecure=[decode.listen, decode.metrics, transfer.transport]"
    config = load(TWO_POOLS, "mode=colocated", *open_, allowed)
    assert load(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True))) == config
    assert config_from_json(config.model_dump_json()) == config
    with pytest.raises(ConfigError, match=r"prefill\.listen \(0\.0\.0\.0:1\): listens beyond"):
        load(TWO_POOLS, *open_, allowed)
    with pytest.raises(ConfigError, match=r"decode\.listen \(0\.0\.0\.0:0\): listens beyond"):
        load(TWO_POOLS, "mode=colocated", *open_)


@pytest.mark.parametrize(
    ("sets", "bounds"),
    [
        ([], (1, 4096)),
        (["decode.autoscale.max=4"], (1 + 3, 4 + 3)),
        (["decode.autoscale.max=4", "prefill.autoscale={min: 2, max: 8}"], (1 + 2, 4 + 8)),
        (["prefill.autoscale={min: 2, max: 8}"], (1, 4096)),
    ],
)
def test_bounds_are_those_of_decode_and_what_the_other_pool_had(load, sets, bounds):
    config = load(TWO_POOLS, "mode=colocated", *sets)
    assert config.bounds == {Role.DECODE: bounds}
    assert (config.decode.autoscale is None) is (not any("decode" in one for one in sets))


def test_no_prefill_worker_is_needed_with_it_and_with_it_alone(load):
    assert load(TWO_POOLS, "mode=colocated", "prefill.replicas=0").decode.replicas == 2
    for sets in (["prefill.replicas=0"], ["mode=colocated", "decode.replicas=0"]):
        with pytest.raises(ConfigError, match=r"replicas: .*greater than 0"):
            load(TWO_POOLS, *sets)
    # Together they may not exceed one pool's limit, because the file in the state folder must load again.
    assert load(TWO_POOLS, "mode=colocated", "decode.replicas=4093").decode.replicas == 4096
    with pytest.raises(ConfigError, match=r"decode.replicas: must be at most 4096 in both pools, got 4097"):
        load(TWO_POOLS, "mode=colocated", "decode.replicas=4094")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    certs(folder / "a", ["worker-0.example", "10.1.2.3"], 30)
    certs(folder / "b", [], 30)
    return folder


@pytest.fixture
def secured(load):
    return lambda text, **places: load("model: {path: oracle}\n" + text.format(**places))


def expired(folder, other):
    """Return an expired certificate of the same CA and key."""
    signer = ["-CA", folder / "ca.pem", "-CAkey", folder / "ca-key.pem", "-set_serial", "7", "-days", "-1"]
    request = ["openssl", "req", "-new", "-key", folder / "key.pem", "-subj", "/CN=old", "-out", other / "request.pem"]
    subprocess.run(request, check=True, capture_output=True)
    command = ["openssl", "x509", "-req", "-in", other / "request.pem", *signer, "-out", other / "old.pem"]
    subprocess.run(command, check=True, capture_output=True)
    return other / "old.pem"


def test_a_folder_is_three_files_and_all_are_found_beside_the_cluster_file(secured, made, tmp_path):
    tls = secured("security: {{tls: {folder}}}", folder=made / "a").security.tls
    assert (tls.cert, tls.key, tls.ca) == tuple(f"{made}/a/{part}.pem" for part in ("cert", "key", "ca"))
    copytree(made / "a", tmp_path / "tls")
    (tmp_path / "tokens.yaml").write_text("")
    (tmp_path / "receipt.pem").write_text("")
    security = secured("security: {{tls: tls, tokens: tokens.yaml, receipt_key: receipt.pem}}").security
    assert (security.tls.key, security.tokens) == (f"{tmp_path}/tls/key.pem", f"{tmp_path}/tokens.yaml")
    assert security.receipt_key == f"{tmp_path}/receipt.pem"


FILES = "security: {{tls: {{cert: {a}/cert.pem, key: {a}/key.pem, ca: {a}/ca.pem}}}}"
WRONG_FILES = {
    "missing": (FILES.replace("{a}/key.pem", "{a}/none.pem"), ["security.tls.key", "none.pem", "No such file"]),
    "key of another": (FILES.replace("{a}/key.pem", "{b}/key.pem"), ["security.tls.key", "not the key of"]),
    "ca of another": (FILES.replace("{a}/ca.pem", "{b}/ca.pem"), ["security.tls.cert", "would reject it"]),
    "a key as certificate": (FILES.replace("{a}/cert.pem", "{a}/key.pem"), ["security.tls.cert", "cannot be used"]),
    "not PEM": (FILES.replace("{a}/ca.pem", "{junk}"), ["security.tls.ca", "not a PEM file"]),
    "an encrypted key": (FILES.replace("{a}/key.pem", "{locked}"), ["security.tls.key", "is encrypted"]),
    "expired": (FILES.replace("{a}/cert.pem", "{old}"), ["security.tls.cert", "expired"]),
    "a folder": ("security: {{tls: {junk}}}", ["security.tls.cert", "cannot be read"]),
    "another name": (FILES.replace("ca: ", "name: other, ca: "), ["security.tls.name", "'other'", "10.1.2.3"]),
    "incomplete": ("security: {{tls: {{cert: x, key: y}}}}", ["security.tls.ca", "required"]),
    "an unknown key": ("security: {{tls: {{crt: x}}}}", ["security.tls.crt", "did you mean"]),
    "not a listener": ("security: {{allow_insecure: [router.prom]}}", ["security.allow_insecure", "router.metrics"]),
    "neither": ("security: {{allow_insecure: maybe}}", ["security.allow_insecure", "true, false, or a list"]),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_a_mistake_in_files_is_named(secured, made, tmp_path, case):
    text, expected = WRONG_FILES[case]
    (tmp_path / "junk.pem").write_text("junk")
    key = "ENCRYPTED PRIVATE KEY-----\n"
    (tmp_path / "locked.pem").write_text(f"-----BEGIN {key}x\n-----END {key}")
    places = {"a": made / "a", "b": made / "b", "junk": tmp_path / "junk.pem", "locked": tmp_path / "locked.pem"}
    with pytest.raises(ConfigError) as caught:
        secured(text, **places, old=expired(made / "a", tmp_path) if "{old}" in text else "")
    for part in ("cluster.yaml", *expected):
        assert part in str(caught.value)
    named = secured(FILES.replace("ca: ", "name: worker-0.example, ca: "), a=made / "a")
    assert named.security.tls.name == "worker-0.example"


LISTENERS = {
    "router.grpc": ("router: {{grpc: '0.0.0.0:1'}}", {"tls", "tokens"}),
    "router.admin": ("router: {{admin: '[::]:1'}}", {"tls", "tokens"}),
    "prefill.listen": ("transfer: {{transport: grpc}}\nprefill: {{listen: 'worker:1'}}", {"tls"}),
    "decode.listen": ("transfer: {{transport: shm}}\ndecode: {{listen: '10.0.0.1:1'}}", {"tls"}),
}


@pytest.mark.parametrize("listener", LISTENERS)
@pytest.mark.parametrize("given", [(), ("tls",), ("tokens",), ("tls", "tokens")], ids="+".join)
def test_an_open_listener_needs_what_guards_it(secured, made, listener, given):
    text, needed = LISTENERS[listener]
    keys = {"tls": made / "a", "tokens": made / "tokens.yaml"}
    text += "\nsecurity: {{" + ", ".join(f"{key}: {keys[key]}" for key in given) + "}}"
    if needed <= set(given):
        secured(text)
        return
    with pytest.raises(ConfigError) as caught:
        secured(text)
    missing = [f"security.{key}" for key in ("tls", "tokens") if key in needed - set(given)]
    assert f"{listener} (" in str(caught.value)
    assert f"without {' and '.join(missing)};" in str(caught.value)


def test_an_insecure_listener_is_said_so_by_name(secured, made):
    both = f"tls: {made / 'a'}, tokens: {made / 'tokens'}"
    text = "router: {{metrics: '0.0.0.0:1', grpc: '0.0.0.0:2'}}\nsecurity: {{" + both + "%s}}"
    with pytest.raises(ConfigError, match=r"router\.metrics .*plain HTTP"):
        secured(text % "")
    secured(text % ", allow_insecure: [router.metrics]")
    secured("router: {{metrics: '0.0.0.0:1', grpc: '0.0.0.0:2'}}\nsecurity: {{allow_insecure: true}}")
    with pytest.raises(ConfigError, match=r"router\.grpc"):
        secured("router: {{metrics: '0.0.0.0:1', grpc: '0.0.0.0:2'}}\nsecurity: {{allow_insecure: [router.metrics]}}")


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_kv_in_the_clear_between_machines_is_said_so(secured, made, transport):
    text = f"decode: {{{{listen: '10.0.0.1:1'}}}}\ntransfer: {{{{transport: {transport}}}}}\n"
    text += f"security: {{{{tls: {made / 'a'}%s}}}}"
    with pytest.raises(ConfigError, match=r"transfer\.transport .*encryption of KV"):
        secured(text % "")
    secured(text % ", allow_insecure: [transfer.transport]")
    secured(text.replace("10.0.0.1", "127.0.0.1") % "")
    with pytest.raises(ConfigError, match=r"transfer\.transport .*security\.tls, and .*auto or grpc"):
        secured("decode: {{listen: '10.0.0.1:1'}}\nsecurity: {{allow_insecure: [decode.listen]}}")


@pytest.mark.parametrize(
    ("security", "encrypted"),
    [
        ("tls: {tls}", True),
        ("tls: {tls}, allow_insecure: [router.metrics]", True),
        ("tls: {tls}, allow_insecure: [transfer.transport]", False),
        ("tls: {tls}, allow_insecure: true", False),
        ("allow_insecure: true", False),
    ],
)
def test_auto_encrypts_kv_between_machines_where_there_are_certificates(secured, made, security, encrypted):
    security = security.format(tls=made / "a")
    config = secured("decode: {{listen: '10.0.0.1:1'}}\nsecurity: {{" + security + "}}")
    assert from_config(config, Role.DECODE, "decode-0").transfer.encrypted is encrypted
    assert config.kv_is_encrypted is encrypted


def test_certificates_are_renewed_by_the_same_ca_and_made_for_hosts_alone(tmp_path, capsys):
    certs(tmp_path / "tls", [], 30)
    first = {file.name: file.read_bytes() for file in (tmp_path / "tls").iterdir()}
    assert sorted(first) == ["ca-key.pem", "ca.pem", "cert.pem", "key.pem"]
    certs(tmp_path / "tls", ["host.example"], 30)
    second = {file.name: file.read_bytes() for file in (tmp_path / "tls").iterdir()}
    assert {name for name in first if first[name] == second[name]} == {"ca.pem", "ca-key.pem"}
    assert "host.example" in capsys.readouterr().out
    for host in ("a,b", "host:1", "", "a\nb", "-x", "DNS:y"):
        with pytest.raises(ConfigError, match="--host"):
            certs(tmp_path / "none", [host], 30)
    assert not (tmp_path / "none").exists()
    modes = {name: (tmp_path / "tls" / name).stat().st_mode & 0o777 for name in ("key.pem", "ca-key.pem")}
    assert modes == {"key.pem": 0o600, "ca-key.pem": 0o600}


@pytest.mark.parametrize(("lost", "left"), [("ca-key.pem", "ca.pem"), ("ca.pem", "ca-key.pem")])
def test_half_a_ca_is_not_replaced(tmp_path, lost, left):
    """Its key may be kept elsewhere. Others trust only this CA."""
    certs(tmp_path, [], 30)
    (tmp_path / lost).unlink()
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=f"{lost}: missing, but {left} is there; bring it back"):
        certs(tmp_path, ["host.example"], 30)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
