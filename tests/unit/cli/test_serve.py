"""`baton serve`: options become settings, mistakes name the option, and options of vLLM are answered with Baton's."""

import hashlib
import json
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from baton.cli.cluster import launch, serve_model
from baton.cli.cluster.vllm_options import THERE
from baton.cli.setup.certs import certs
from baton.cluster.state_dir import ClusterState, ProcessId
from baton.config import ClusterConfig, load_config, located
from baton.errors import ConfigError
from router.auth.tokens import read_tokens
from tests.unit.engine.test_determinism import DEMO

PAGE = (Path(DEMO).parents[1] / "docs" / "how-to" / "from-vllm.md").read_text()
STATE = ClusterState("serve", ProcessId(1, ""), "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "", "", http="0.0.0.0:4")


class Started:
    """The config of a cluster that does not start, and the output."""

    config: ClusterConfig
    announced: str


@pytest.fixture
def serve(monkeypatch, tmp_path, capsys):
    """Return a function that runs `baton serve` up to the start of the cluster."""
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    started = Started()

    def up(file, sets, stop, *, detach, announce):
        started.config = load_config(file, sets, {})
        announce(STATE, started.config)

    monkeypatch.setattr(launch, "up", up)

    def run(*words, status=0):
        ended = CliRunner().invoke(app, ["serve", *map(str, words)])
        if ended.exception is not None and not isinstance(ended.exception, SystemExit):
            raise ended.exception
        assert ended.exit_code == status, ended.output
        started.announced = " ".join(re.sub("[│╭╮╰╯─]", "", ended.output).split())
        return started

    return run


def test_one_worker_of_each_pool_over_http_and_grpc(serve):
    config = serve(DEMO).config
    assert (config.prefill.replicas, config.decode.replicas, config.ray.address) == (1, 1, "none")
    assert (config.router.http, config.router.grpc) == ("127.0.0.1:8000", "127.0.0.1:50051")
    assert (config.model.path, config.model.max_model_len, config.security.tokens) == (str(DEMO), "auto", None)


def test_options_are_settings(serve):
    words = "--prefill 2 --decode 3 --port 0 --max-model-len 64 --quantize int8 --dtype float32 --device cpu --name it"
    config = serve(DEMO, *words.split(), "--set", "decode.max_running=7").config
    assert (config.prefill.replicas, config.decode.replicas, config.decode.max_running) == (2, 3, 7)
    assert (config.router.http, config.name) == ("127.0.0.1:0", "it")
    assert (config.model.max_model_len, config.model.quantize, config.model.dtype) == (64, "int8", "float32")
    assert {config.prefill.device, config.decode.device} == {"cpu"}


@pytest.mark.parametrize("words", [(), ("models/demo",)])
def test_outside_a_repository_the_demo_model_is_that_of_the_wheel(serve, words, tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models/demo").symlink_to(DEMO)
    monkeypatch.setattr(serve_model, "SHIPPED", tmp_path)
    monkeypatch.chdir("/")
    assert serve(*words).config.model.path == str(tmp_path / "models/demo")


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_names_of_the_model(serve, names):
    config = serve(DEMO, *(word for name in names for word in ("--served-model-name", name))).config
    assert list(config.model.names) == names


@pytest.mark.parametrize("detach", [False, True])
def test_a_detached_cluster_is_not_stopped_by_a_signal(serve, detach):
    text = serve(DEMO, *["--detach"] * detach).announced
    assert text.endswith("`baton down --name serve` stops it.")
    assert ("Ctrl-C" in text) != detach


def test_a_given_file_is_below_the_options(serve, tmp_path):
    (file := tmp_path / "c.yaml").write_text("name: mine\nmodel: {path: oracle}\nrouter: {http: '127.0.0.1:7'}\n")
    config = serve("-c", file, "--decode", 2).config
    assert (config.name, config.model.path, config.decode.replicas) == ("mine", "oracle", 2)
    assert config.router.http == "127.0.0.1:7"


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("Qwen/Qwen3-0.6B", "hf:Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B@main", "hf:Qwen/Qwen3-0.6B@main"),
        ("hf:Qwen/Qwen3-0.6B", "hf:Qwen/Qwen3-0.6B"),
        ("oracle", "oracle"),
        ("odd: {name", "HERE/odd: {name"),
        ("mine", "HERE/mine"),
        ("there/mine", "HERE/there/mine"),
    ],
)
def test_hub_names_need_no_prefix_where_they_can_be_no_folder(serve, model, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert serve(model).config.model.path == path.replace("HERE", str(tmp_path))


def test_a_key_is_kept_as_a_hash_and_another_one_changes_no_running_cluster(serve, tmp_path):
    first = serve(DEMO, "--api-key", "s3cret").config.security.tokens
    second = serve(DEMO, "--api-key", "other").config.security.tokens
    assert first is not None
    assert second is not None
    assert first != second
    assert [read_tokens(first).grant("Bearer s3cret").tenant, read_tokens(second).grant("Bearer other").tenant] == [
        "default"
    ] * 2
    assert Path(first).stat().st_mode & 0o777 == 0o600
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not any(b"s3cret" in path.read_bytes() for path in files)
    assert hashlib.sha256(b"s3cret").hexdigest() in Path(first).read_text()


def test_an_open_address_needs_a_key(serve):
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0: an address off the loopback needs --api-key"):
        serve(DEMO, "--host", "0.0.0.0")
    config = serve(DEMO, "--host", "0.0.0.0", "--api-key", "k", "--port", 80).config
    assert (config.router.http, config.router.grpc) == ("0.0.0.0:80", "127.0.0.1:50051")
    assert config.security.allow_insecure == ("router.http",)
    assert serve(DEMO, "--host", "::1").config.router.http == "[::1]:8000"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--decode -1", "--decode -1: decode.replicas: input should be greater than 0"),
        ("--max-model-len x", "--max-model-len x: model.max_model_len: "),
        ("--quantize int3", "--quantize int3: model.quantize: input should be 'none', 'int8' or 'int4'"),
        ("--device tpu", "--device tpu: prefill.device: "),
        ("--name A_B", "--name A_B: name: "),
        ("--host a_b/c", "--host a_b/c: must be a host without a port"),
        ("--api-key=", "--api-key: must not be empty"),
        ("--set foo.bar=1", "--set foo.bar: foo: unknown key"),
        ("--set decode.replicas=0", "--set decode.replicas=0: decode.replicas: "),
    ],
)
def test_a_mistake_names_the_option(serve, words, problem):
    with pytest.raises(ConfigError) as found:
        serve(DEMO, *words.split())
    assert str(found.value).startswith(problem)


@pytest.mark.parametrize(
    ("key", "option"),
    [("router.metrics", "--set router.metrics=..."), ("router.http", "--port"), ("name", "--name")],
)
def test_a_problem_with_a_value_of_the_preset_names_the_option_that_sets_it(serve, monkeypatch, key, option):
    def up(file, sets, stop, *, detach, announce):
        with located(file, sets, {}):
            raise ConfigError(f"{key}: in use")

    monkeypatch.setattr(launch, "up", up)
    with pytest.raises(ConfigError) as found:
        serve(DEMO)
    assert str(found.value) == f"{option}: in use"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--tensor-parallel-size 2", "in Baton: --set prefill.tensor_parallel=N --set decode.tensor_parallel=N"),
        ("--max_num_seqs=3", "in Baton: --set prefill.max_running=N"),
        ("--enable-lora", "--enable-lora: Baton has no such option"),
        ("--prot 3", "did you mean --port?"),
        ("--zzz", "--zzz: no such option; see baton serve --help"),
        ("another", "another: one model only"),
        ("--model x", "in Baton: the first word, as in baton serve MODEL"),
        ("-O3", "-O3: Baton has no such option"),
        ("-O.level=3", "-O: Baton has no such option"),
        ("--compilation_config.level 3", "--compilation_config: Baton has no such option"),
        ("-cc {}", "-cc: Baton has no such option"),
        ("-cc.level=3", "-cc: Baton has no such option"),
        ("-dpl 2", "-dpl: Baton has no such option"),
        ("-dcp=2", "-dcp: Baton has no such option"),
        ("-dcp2", "-dcp2: Baton has no such option"),
        ("-dp2", "-dp2: "),
        ("--no-disable-cascade-attn", "--no-disable-cascade-attn: Baton has no such option"),
        ("--device-ids 1", "--device-ids: an option of vLLM; in Baton: --device cuda:N"),
        ("-dp 2", "-dp: an option of vLLM; in Baton: --decode N"),
        ("--no-async-scheduling", "--no-async-scheduling: Baton has no such option"),
    ],
)
def test_other_options_are_answered(serve, words, answer):
    assert answer in serve(DEMO, *words.split(), status=2).announced


def test_a_file_may_be_written_behind_its_option(serve):
    with pytest.raises(ConfigError, match=r"^c\.yaml: cannot be read"):
        serve(DEMO, "-cc.yaml")


def test_the_page_and_the_answers_are_about_the_same_options():
    """Each option of vLLM in the page's table is one of `baton serve`, or has an answer that holds."""
    rows = re.findall(r"^\| (`-.*?) \|", PAGE.partition("## Options")[2].partition("## Disaggregated")[0], re.MULTILINE)
    listed = {name.split()[0] for row in rows for name in re.findall(r"`(-[^`]*)`", row)}
    own = set(re.findall(r"--[a-z-]+", CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output))
    assert len(listed) > 30
    assert listed - own - set(THERE) == set()
    assert not own & set(THERE)
    for answer in THERE.values():
        for key in re.findall(r"--set ([a-z_.]+)=", answer):
            section, name = key.split(".")
            assert name in type(getattr(ClusterConfig(), section)).model_fields, key
        assert all(option in own for option in re.findall(r"--[a-z-]+", answer))


def test_the_announcement_of_a_secured_cluster_has_its_certificate_and_token(serve, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("BATON_TOKEN", raising=False)
    certs(tmp_path / "tls", [], 30)
    capsys.readouterr()
    (tokens := tmp_path / "tokens.yaml").write_text(f"tokens: [{{token_sha256: {'0' * 64}, tenant: a, role: user}}]")
    started = serve(DEMO, "--set", f"security.tls={tmp_path / 'tls'}", "--set", f"security.tokens={tokens}")
    authority = started.config.security.tls.ca
    options = f'--cacert {authority} -H "authorization: Bearer $BATON_TOKEN"'
    assert f"curl -s https://127.0.0.1:4/v1/chat/completions {options} -H" in started.announced
    assert "export BATON_TOKEN=..." in started.announced
    assert f"export SSL_CERT_FILE={authority}" in started.announced
    assert 'base_url="https://127.0.0.1:4/v1", api_key=os.environ["BATON_TOKEN"]' in started.announced
    launch.announce(STATE, started.config)
    assert f"curl -s https://0.0.0.0:4/v1/completions {options} -H" in (text := capsys.readouterr().out)
    assert "HTTP     https://0.0.0.0:4/v1\n" in text


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.json", "chat_template.jinja"])
def test_a_template_in_any_file_makes_the_example_a_chat(file, tmp_path):
    config = ClusterConfig.model_validate({"model": {"path": str(tmp_path)}})
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert not serve_model._chats(config)
    (tmp_path / file).write_text('{"chat_template": "x"}')
    assert serve_model._chats(config)


def test_the_announcement_can_be_used(serve, tmp_path, monkeypatch):
    text = serve(DEMO, "--api-key", "k").announced
    assert 'curl -s http://127.0.0.1:4/v1/chat/completions -H "authorization: Bearer $BATON_API_KEY"' in text
    assert "export BATON_API_KEY=..." in text
    monkeypatch.setenv("BATON_API_KEY", "k")
    assert "export" not in serve(DEMO).announced
    assert "export BATON_API_KEY=..." in serve(DEMO, "--api-key", "another").announced
    monkeypatch.delenv("BATON_API_KEY")
    body = json.loads(text.partition("-d '")[2].partition("'")[0])
    assert (body["model"], body["messages"][0]["role"]) == ("demo", "user")
    assert 'base_url="http://127.0.0.1:4/v1", api_key=os.environ["BATON_API_KEY"]' in text
    assert "k" not in re.findall(r"Bearer (\S+)\"", text)
    plain = serve("oracle").announced
    assert "/v1/completions -H 'content-type" in plain
    assert 'api_key="none"' in plain
    assert os.fspath(tmp_path) not in plain
