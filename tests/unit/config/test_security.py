"""`security` in the cluster file: checks of its files, and the listeners that need them."""

import subprocess
from shutil import copytree

import pytest

from baton.cli.setup.certs import certs
from baton.core import Role
from baton.errors import ConfigError
from baton.worker.settings import from_config


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    certs(folder / "a", ["worker-0.example", "10.1.2.3"], 30)
    certs(folder / "b", [], 30)
    return folder


@pytest.fixture
def load(load):
    return lambda text, **places: load("model: {path: oracle}\n" + text.format(**places))


def expired(folder, other):
    """Return an expired certificate of the same CA and key."""
    signer = ["-CA", folder / "ca.pem", "-CAkey", folder / "ca-key.pem", "-set_serial", "7", "-days", "-1"]
    request = ["openssl", "req", "-new", "-key", folder / "key.pem", "-subj", "/CN=old", "-out", other / "request.pem"]
    subprocess.run(request, check=True, capture_output=True)
    command = ["openssl", "x509", "-req", "-in", other / "request.pem", *signer, "-out", other / "old.pem"]
    subprocess.run(command, check=True, capture_output=True)
    return other / "old.pem"


def test_a_folder_is_three_files_and_all_are_found_beside_the_cluster_file(load, made, tmp_path):
    tls = load("security: {{tls: {folder}}}", folder=made / "a").security.tls
    assert (tls.cert, tls.key, tls.ca) == tuple(f"{made}/a/{part}.pem" for part in ("cert", "key", "ca"))
    copytree(made / "a", tmp_path / "tls")
    (tmp_path / "tokens.yaml").write_text("")
    security = load("security: {{tls: tls, tokens: tokens.yaml}}").security
    assert (security.tls.key, security.tokens) == (f"{tmp_path}/tls/key.pem", f"{tmp_path}/tokens.yaml")


FILES = "security: {{tls: {{cert: {a}/cert.pem, key: {a}/key.pem, ca: {a}/ca.pem}}}}"
WRONG = {
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


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_named(load, made, tmp_path, case):
    text, expected = WRONG[case]
    (tmp_path / "junk.pem").write_text("junk")
    key = "ENCRYPTED PRIVATE KEY-----\n"
    (tmp_path / "locked.pem").write_text(f"-----BEGIN {key}x\n-----END {key}")
    places = {"a": made / "a", "b": made / "b", "junk": tmp_path / "junk.pem", "locked": tmp_path / "locked.pem"}
    with pytest.raises(ConfigError) as caught:
        load(text, **places, old=expired(made / "a", tmp_path) if "{old}" in text else "")
    for part in ("cluster.yaml", *expected):
        assert part in str(caught.value)
    named = load(FILES.replace("ca: ", "name: worker-0.example, ca: "), a=made / "a")
    assert named.security.tls.name == "worker-0.example"


LISTENERS = {
    "router.grpc": ("router: {{grpc: '0.0.0.0:1'}}", {"tls", "tokens"}),
    "router.admin": ("router: {{admin: '[::]:1'}}", {"tls", "tokens"}),
    "prefill.listen": ("transfer: {{transport: grpc}}\nprefill: {{listen: 'worker:1'}}", {"tls"}),
    "decode.listen": ("transfer: {{transport: shm}}\ndecode: {{listen: '10.0.0.1:1'}}", {"tls"}),
}


@pytest.mark.parametrize("listener", LISTENERS)
@pytest.mark.parametrize("given", [(), ("tls",), ("tokens",), ("tls", "tokens")], ids="+".join)
def test_an_open_listener_needs_what_guards_it(load, made, listener, given):
    text, needed = LISTENERS[listener]
    keys = {"tls": made / "a", "tokens": made / "tokens.yaml"}
    text += "\nsecurity: {{" + ", ".join(f"{key}: {keys[key]}" for key in given) + "}}"
    if needed <= set(given):
        load(text)
        return
    with pytest.raises(ConfigError) as caught:
        load(text)
    missing = [f"security.{key}" for key in ("tls", "tokens") if key in needed - set(given)]
    assert f"{listener} (" in str(caught.value)
    assert f"without {' and '.join(missing)};" in str(caught.value)


def test_an_insecure_listener_is_said_so_by_name(load, made):
    both = f"tls: {made / 'a'}, tokens: {made / 'tokens'}"
    text = "router: {{metrics: '0.0.0.0:1', grpc: '0.0.0.0:2'}}\nsecurity: {{" + both + "%s}}"
    with pytest.raises(ConfigError, match=r"router\.metrics .*plain HTTP"):
        load(text % "")
    load(text % ", allow_insecure: [router.metrics]")
    load("router: {{metrics: '0.0.0.0:1', grpc: '0.0.0.0:2'}}\nsecurity: {{allow_insecure: true}}")
    with pytest.raises(ConfigError, match=r"router\.grpc"):
        load("router: {{metrics: '0.0.0.0:1', grpc: '0.0.0.0:2'}}\nsecurity: {{allow_insecure: [router.metrics]}}")


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_kv_in_the_clear_between_machines_is_said_so(load, made, transport):
    text = f"decode: {{{{listen: '10.0.0.1:1'}}}}\ntransfer: {{{{transport: {transport}}}}}\n"
    text += f"security: {{{{tls: {made / 'a'}%s}}}}"
    with pytest.raises(ConfigError, match=r"transfer\.transport .*encryption of KV"):
        load(text % "")
    load(text % ", allow_insecure: [transfer.transport]")
    load(text.replace("10.0.0.1", "127.0.0.1") % "")
    with pytest.raises(ConfigError, match=r"transfer\.transport .*security\.tls, and .*auto or grpc"):
        load("decode: {{listen: '10.0.0.1:1'}}\nsecurity: {{allow_insecure: [decode.listen]}}")


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
def test_auto_encrypts_kv_between_machines_where_there_are_certificates(load, made, security, encrypted):
    security = security.format(tls=made / "a")
    config = load("decode: {{listen: '10.0.0.1:1'}}\nsecurity: {{" + security + "}}")
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
