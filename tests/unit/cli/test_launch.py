"""`baton up`: overrides, settings without passwords and a model that is fetched once."""

import json
import socket
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from baton import __version__
from baton.cli.cluster import launch, ports, size_check
from baton.cli.cluster.launch import as_environment, as_options, fetched
from baton.cli.cluster.model_check import check_architecture, check_model
from baton.cli.cluster.ports import check_ports
from baton.cli.cluster.serve import router_settings
from baton.cli.cluster.size_check import check_sizes
from baton.cli.setup.config import effective
from baton.cluster.signals import Stop
from baton.cluster.state_dir import StateFolder, running_clusters
from baton.config import ClusterConfig, load_config
from baton.core import Role
from baton.engine.models.fallback import choice
from baton.engine.models.fallback.choice import REFUSED
from baton.errors import Cancelled, ConfigError
from baton.network import redacted
from tests.unit.test_hub import COMMIT, snapshot


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("embedded", "embedded"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://:s3cret@host:6379/0", "redis://:***@host:6379/0"),
        ("rediss://user:s3cret@host/0", "rediss://user:***@host/0"),
        ("redis://user@host/0", "redis://user@host/0"),
        ("redis://user:s3@cret@host/0", "redis://user:***@host/0"),
        ("redis://user:s3/cret@host/0", "redis://user:***@host/0"),
        ("redis://user:s3:cret@host/0", "redis://user:***@host/0"),
        ("redis://user:s3?cret@host/0", "redis://***"),
        ("redis://host:1/0?password=s3cret", "redis://host:1/0?***"),
        ("redis://host:1/0?password=s3@cret", "redis://***"),
        ("unix://user:s3cret@/run/redis.sock?db=0", "unix://user:***@/run/redis.sock?***"),
    ],
)
def test_no_part_of_a_password_is_shown(url, shown):
    assert redacted(url) == shown
    config = ClusterConfig.model_validate({"redis": {"url": url}})
    assert effective(config)["redis"] == {"url": shown}
    assert "cret" not in str(effective(config))


FILE = "model: {path: oracle}\nprefill: {replicas: 3}\nrouter: {tenants: {Else: 2}}\n"
SETS = ["redis.url=redis://:s3=cret@h:1/0", "decode.replicas=2", " router.queue.max_wait_s = 2.5", "name=other"]


def test_overrides_say_the_same_as_variables_or_go_by_the_command_line(tmp_path):
    (file := tmp_path / "c.yaml").write_text(FILE)
    mine = {"BATON__PREFILL__REPLICAS": "4", "BATON__NAME": "mine", "HOME": "/"}
    env = as_environment(SETS, mine)
    assert load_config(file, (), env) == load_config(file, SETS, mine)
    assert "HOME" not in env
    sets = [*SETS, "router.tenants={x: 1}", "router.tenants.TeamA=3", "router.tenants.a__b=4"]
    env, options = as_environment(sets, {}), as_options(sets)
    assert load_config(file, options, env) == load_config(file, sets)
    assert options == ["router.tenants.TeamA=3", "router.tenants.a__b=4"], "what no variable can say, and no secret"


@pytest.mark.parametrize(
    "sets",
    [
        ["decode.autoscale.max=9", "decode.autoscale={min: 1, max: 4}"],
        ["decode.autoscale.max=4", "decode.autoscale=null"],
        ["decode.replicas=2", "decode={replicas: 3}"],
    ],
)
def test_a_later_section_replaces_its_keys_before_also_in_a_detached_process(tmp_path, sets):
    (file := tmp_path / "c.yaml").write_text(FILE)
    mine = {"BATON__DECODE__AUTOSCALE__MAX": "5", "BATON__DECODE__MAX_RUNNING": "7"}
    assert load_config(file, (), as_environment(sets, mine)) == load_config(file, sets, mine)


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ({}, {"attempts": 3, "local_prefill": True, "think_while_decoding": False}),
        (
            {"slo": {"ttft_ms": 250, "itl_ms": 20}, "retry": {"attempts": 5}},
            {"policy": "predicted", "slo_ttft_s": 0.25, "slo_itl_s": 0.02, "attempts": 5},
        ),
        ({"router": {"local_prefill": "never"}}, {"local_prefill": False}),
        ({"thinking": {"while_decoding": True}}, {"think_while_decoding": True}),
        (
            {"router": {"queue": {"max_requests": 5, "max_tokens": 600, "max_wait_s": 2.5}, "tenants": {"team-a": 3}}},
            {"queue_max_requests": 5, "queue_max_tokens": 600, "queue_max_wait_s": 2.5, "tenants": {"team-a": 3.0}},
        ),
        ({"ledger": {"lease_s": 6.0, "heartbeat_s": 2.0}}, {"worker_silence_s": 6.0, "version": __version__}),
    ],
    ids=["defaults", "SLO and attempts", "no local prefill", "thinking", "who may wait", "a silent worker"],
)
def test_a_router_is_told_what_the_file_says(file, told):
    settings = router_settings(ClusterConfig.model_validate(file))
    assert {name: getattr(settings, name) for name in told} == told


def config(path):
    return ClusterConfig.model_validate({"model": {"path": path}})


@pytest.mark.parametrize("path", ["oracle", "models/demo"])
def test_folders_are_left_alone(path):
    assert fetched(config(path), Stop()) == config(path)


@pytest.mark.slow
def test_a_model_of_the_hub_is_pinned_to_its_commit_and_keeps_its_name(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    snapshot(tmp_path)
    found = fetched(config("hf:org/tiny"), Stop())
    assert (found.model.path, found.model.name) == (f"hf:org/tiny@{COMMIT}", "org/tiny")
    assert fetched(found, Stop()) == found


def test_a_download_ends_when_told_to(monkeypatch):
    """The process that downloads is replaced by one that never ends."""
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    monkeypatch.setattr(launch, "COMMAND", ("-c", "exec sleep 1000"))
    stop = Stop()
    threading.Timer(0.2, stop.drain.set).start()
    with pytest.raises(Cancelled):
        fetched(config("hf:org/tiny"), stop)


@pytest.mark.parametrize("detach", [False, True])
def test_a_plan_that_needs_more_gpus_than_there_are_is_refused_before_anything_starts(tmp_path, monkeypatch, detach):
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "home"))
    (file := tmp_path / "c.yaml").write_text("model: {path: hf:org/never-fetched}\nprefill: {device: cpu}\n")
    with pytest.raises(ConfigError, match=r"decode\.device: cuda:99: .* need GPU 99, and this host has \d+"):
        launch.up(file, ["decode.device=cuda:99"], Stop(), detach=detach, announce=launch.announce)
    assert not (tmp_path / "home").exists()


NONE = {"model.safetensors": None}
EMPTY = "\x02\0\0\0\0\0\0\0{}"
INDEXED = {"model.safetensors.index.json": '{"weight_map": {"a": "model-1.safetensors"}}'}
UNREAD = {"consolidated.safetensors": EMPTY[:-1], "adapter_model.safetensors": "", "optimizer.safetensors": "cut"}
LENGTHS = '{"model_type": "%s", "max_position_embeddings": 64, "model_max_length": 256}'
LFS = "version https://git-lfs.github.com/spec/v1"


@pytest.mark.parametrize(
    ("files", "tree", "words"),
    [
        (None, {}, "model.path: cannot read the folder"),
        ({"config.json": "{}"}, {}, "has no tokenizer.json"),
        ({"config.json": "{}", "vocab.json": "", "merges.txt": ""}, {}, None),
        ({"config.json": "{}", "a.gguf": "", **NONE}, {}, "model'?: only GGUF files: .* such as a.gguf"),
        ({"config.json": "{}", "tokenizer.json": "", "model.safetensors": LFS}, {}, "model.safetensors: is a git-lfs"),
        (
            {"config.json": "{}", "tokenizer.json": "", "tokenizer_config.json": LFS},
            {},
            "tokenizer_config.json: is a git-lfs",
        ),
        ({"config.json": "{}", "tokenizer.json": "", **NONE}, {}, r"has no model.safetensors and no .*index.json"),
        (
            {"config.json": "{}", "tokenizer.json": "", "model.safetensors": EMPTY[:-1]},
            {},
            "model.safetensors: not a complete safetensors file: .* header",
        ),
        (
            {"config.json": "{}", "tokenizer.json": "", **NONE, **INDEXED},
            {},
            "index.json lists model-1.safetensors, which does not exist",
        ),
        (
            {"config.json": "{}", "tokenizer.json": "", **NONE, **INDEXED, "model-1.safetensors": EMPTY[:-1]},
            {},
            "model-1.safetensors: not a complete safetensors file: .* header",
        ),
        (
            {"config.json": "{}", "tokenizer.json": "", **NONE, **INDEXED, "model-1.safetensors": EMPTY, **UNREAD},
            {},
            None,
        ),
        ({"config.json": "{}", "tokenizer.json": "", **UNREAD}, {}, None),
        ({"config.json": "{}", "tokenizer.json": "", **NONE}, {"ray": {"address": "auto"}}, None),
        ({"config.json": "[", "tokenizer.json": ""}, {}, "is not a readable JSON object"),
        (
            {"config.json": '{"max_position_embeddings": 64}', "tokenizer.json": ""},
            {"model": {"max_model_len": 65}},
            "model.max_model_len: must be at most 64, the model's maximum, got 65",
        ),
        ({"config.json": LENGTHS % "cohere", "tokenizer.json": ""}, {"model": {"max_model_len": 256}}, None),
        ({"config.json": LENGTHS % "cohere", "tokenizer.json": ""}, {"model": {"max_model_len": 257}}, "at most 256,"),
        ({"config.json": LENGTHS % "llama", "tokenizer.json": ""}, {"model": {"max_model_len": 65}}, "at most 64,"),
        (
            {"config.json": '{"max_position_embeddings": 64, "rope_scaling": {"factor": 4}}', "tokenizer.json": ""},
            {"model": {"max_model_len": 256}},
            None,
        ),
        (
            {"config.json": "{}", "tokenizer.json": ""},
            {"decode": {"kv_memory": "900TiB", "device": "cpu"}},
            r"decode.kv_memory: \d+ bytes for each of 1 workers, but this machine has \d+; set fewer, or auto",
        ),
        (
            {"config.json": '{"max_position_embeddings": 64}', "tokenizer.json": ""},
            {"model": {"max_model_len": 64}, "decode": {"kv_memory": "900TiB", "device": "cuda:0"}},
            None,
        ),
    ],
    ids=[
        "no folder",
        "no tokenizer",
        "another tokenizer",
        "GGUF",
        "a pointer",
        "a pointer of a small file",
        "no weights",
        "a part of a file",
        "a missing shard",
        "a part of a shard",
        "shards and other files",
        "weights and other files",
        "weights on other hosts",
        "broken",
        "too long",
        "Command R",
        "too long for Command R",
        "another model with a maximum",
        "extended",
        "too large",
        "fine",
    ],
)
def test_knowable_mistakes_are_found_before_anything_starts(tmp_path, files, tree, words):
    folder = tmp_path / "model"
    for name, text in ({"model.safetensors": EMPTY} | files if files else {}).items():
        folder.mkdir(exist_ok=True)
        if text is not None:
            (folder / name).write_text(text)
    given = {"name": "x", "ray": {"address": "none"}, **tree, "model": {"path": str(folder), **tree.get("model", {})}}
    config = ClusterConfig.model_validate(given)
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        check_model(config, ("0",))


@pytest.mark.parametrize(
    ("config", "backend", "code", "words"),
    [
        ({"model_type": "lfm2"}, "auto", None, None),
        ({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}, "auto", None, None),
        ({"model_type": "rwkv"}, "auto", REFUSED, "^model.path: why not$"),
        ({"model_type": "rwkv"}, "auto", 0, None),
        ({"model_type": "rwkv"}, "auto", 1, None),
        ({"model_type": "rwkv"}, "transformers", None, None),
        ({"model_type": 7}, "auto", None, "^model.path: .*model_type must be a string"),
    ],
)
def test_an_architecture_that_nothing_serves_is_found_before_anything_starts(
    tmp_path, monkeypatch, capsys, config, backend, code, words
):
    """A banner of a library is no reason, neither before one nor alone."""
    monkeypatch.setattr(choice, "transformers_version", lambda: "5")
    (tmp_path / "config.json").write_text(json.dumps(config))
    tree = {"model": {"path": str(tmp_path), "backend": backend}, "ray": {"address": "none"}}
    run = Mock(return_value=(code, "a banner\nwhy not\n"))
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        check_architecture(ClusterConfig.model_validate(tree), run)
    assert run.called == ("transformers ..." in capsys.readouterr().err) == (code is not None)


def test_workers_on_other_hosts_need_no_transformers_here(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "transformers_version", lambda: "")
    (tmp_path / "config.json").write_text('{"model_type": "rwkv"}')
    tree = {"model": {"path": str(tmp_path)}, "ray": {"address": "auto"}}
    check_architecture(ClusterConfig.model_validate(tree), Mock())
    with pytest.raises(ConfigError, match="to serve more architectures"):
        check_architecture(ClusterConfig.model_validate(tree | {"ray": {"address": "local"}}), Mock())


@pytest.mark.slow
def test_a_program_prints_why_nothing_serves_a_folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "foo"}')
    code, output = launch._output(("-m", "baton.engine.models.fallback.choice", str(tmp_path)), Stop())
    assert (code, "'foo'" in output.splitlines()[-1]) == (REFUSED, True)


def test_warnings_of_libraries_are_not_shown_by_the_check_of_an_architecture(tmp_path, monkeypatch, capfd):
    def check(_, run):
        assert run(("-c", "import os; os.write(2, b'noise')")) == (0, "")
        raise Cancelled("stopped")

    monkeypatch.setattr(launch, "check_architecture", check)
    (file := tmp_path / "c.yaml").write_text(OK_FILE % DEMO)
    with pytest.raises(Cancelled):
        launch.up(file, [], Stop(), detach=False, announce=launch.announce)
    assert "noise" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [("model.gguf", "cannot be read: cannot mmap an empty"), ("model.safetensors", "is a file: must be a folder")],
)
def test_a_file_in_place_of_a_folder_is_named(tmp_path, name, text):
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=f"{name}:? {text}"):
        check_model(ClusterConfig.model_validate({"model": {"path": str(tmp_path / name)}}), ())


DEMO = str(Path(__file__).parents[3] / "models" / "demo")
OK_FILE = """
name: x
ray: {address: none}
model: {path: %s, max_model_len: 2048}
router: {grpc: "127.0.0.1:0", metrics: "127.0.0.1:0"}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("decode.kv_memory=1KiB", "decode.kv_memory: 1024 bytes are less than one block of 16384 bytes"),
        ("prefill.kv_memory=1MiB", "prefill.kv_memory: 1048576 bytes hold 1024 tokens, fewer than model.max_model_len"),
        (
            "decode.tensor_parallel=3",
            "decode.tensor_parallel: 3 does not divide the model's num_attention_heads",
        ),
        ("decode.kv_memory=64MiB", None),
        ("decode.tensor_parallel=2", None),
    ],
)
def test_sizes_that_a_worker_would_reject_are_found_before_anything_starts(tmp_path, setting, words):
    (file := tmp_path / "c.yaml").write_text(OK_FILE % DEMO)
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        check_sizes(load_config(file, [setting]), ())
    check_sizes(load_config(file, [setting]), set(Role))  # on GPUs, workers decide


HYBRID = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 8, "intermediate_size": 64,
    "shared_intermediate_size": 64, "num_local_experts": 0, "num_experts_per_tok": 0, "vocab_size": 512,
    "layer_types": ["mamba"] * 7 + ["attention"], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "words"), [("4MiB", None), ("20KiB", "too few for states of recurrent layers")])
def test_sizes_of_recurrent_models_count_states_and_layers_with_attention(tmp_path, memory, words):
    """KV of all layers would not fit into the first size, and KV of one layer alone fits into the second."""
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    (file := tmp_path / "c.yaml").write_text(OK_FILE % tmp_path)
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        check_sizes(load_config(file, [f"decode.kv_memory={memory}", "decode.max_running=1"]), ())


GEMMA4 = {
    "model_type": "gemma4_text", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 512,
}  # fmt: skip


@pytest.mark.slow
def test_sizes_of_layers_with_wider_heads_are_counted(tmp_path):
    """KV of heads of 16 numbers would fit. The last layer has heads of 512."""
    whole = {"model_type": "gemma4", "text_config": GEMMA4}
    for number, config in enumerate((GEMMA4, GEMMA4 | {"global_head_dim": 512}, whole)):
        (folder := tmp_path / str(number)).mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (file := folder / "c.yaml").write_text(OK_FILE % folder)
        with pytest.raises(ConfigError, match="1048576 bytes hold 128 tokens, fewer than"):
            check_sizes(load_config(file, ["decode.kv_memory=1MiB"]), ())


@pytest.mark.parametrize(
    ("changes", "asked"),
    [({}, False), ({"num_attention_heads": ...}, True), ({"mamba_n_heads": 8}, True), ({"hidden_size": 4096}, True)],
)
def test_only_models_in_doubt_need_the_rules_of_the_engine(tmp_path, monkeypatch, changes, asked):
    """Their import is slow. A model for text and images has its sizes in `text_config`."""
    text = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16} | changes
    text |= {"head_dim": 1024} if "hidden_size" in changes else {}
    text = {key: value for key, value in text.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    (file := tmp_path / "c.yaml").write_text(OK_FILE % tmp_path)
    monkeypatch.setattr(size_check, "_check", check := Mock())
    check_sizes(load_config(file, ["decode.kv_memory=1MiB"]), ())
    assert check.called == asked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        (DEMO, [], r"no layer for multi-token prediction of DeepSeek V3 \(model.layers.\d+.eh_proj.weight\); use off"),
        (DEMO, ["ray.address=10.0.0.1:6379"], None),  # its workers, and perhaps the weights, are on other hosts
        ("oracle", [], "the oracle has no layer"),
        ("v3", ["decode.tensor_parallel=2"], "decode.tensor_parallel is 2, and the layer .* needs 1"),
        ("v3", ["model.backend=transformers"], "supported for .*, which runs in transformers"),
        ("v3", [], None),
    ],
)
def test_a_model_that_cannot_predict_is_found_before_anything_starts(tmp_path, model, settings, words):
    """The layer of the second one is there. It is not loaded."""
    if model == "v3":
        import torch

        from tests.unit.model.checkpoints import LATENT, edit_tensors

        LATENT["v3"].write(tmp_path)
        edit_tensors(tmp_path, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.ones(1)}))
    (file := tmp_path / "c.yaml").write_text(OK_FILE.replace("2048", "512") % (tmp_path if model == "v3" else model))
    match = f"^decode.speculation: mtp is not .*{words}"
    with pytest.raises(ConfigError, match=match) if words else nullcontext():
        check_sizes(load_config(file, ["decode.speculation=mtp", *settings]), ())


def test_a_detached_start_can_be_stopped_while_the_model_is_prepared(tmp_path, monkeypatch):
    found = list[str]()

    def prepared(*_):
        found.extend(state.name for state in running_clusters())  # where `baton down` looks
        raise Cancelled("stopped")

    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    monkeypatch.setattr(launch, "prepared", prepared)
    (file := tmp_path / "c.yaml").write_text(OK_FILE % DEMO)
    with pytest.raises(Cancelled):
        launch.up(file, [], Stop(), detach=True, announce=launch.announce)
    assert found == ["x"]
    assert running_clusters() == []


@pytest.mark.parametrize("detach", [False, True])
def test_a_second_start_is_refused_before_its_download(tmp_path, monkeypatch, detach):
    monkeypatch.setattr(launch, "configure_logging", lambda *_: None)  # would change other tests' logs
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    prepared = Mock(side_effect=Cancelled("stopped"))
    monkeypatch.setattr(launch, "prepared", prepared)
    (file := tmp_path / "c.yaml").write_text(OK_FILE % DEMO)
    (first := StateFolder("x")).acquire()
    try:
        with pytest.raises(ConfigError, match="name: a cluster named 'x' is running"):
            launch.up(file, [], Stop(), detach=detach, announce=launch.announce)
        assert not prepared.called
    finally:
        first.release()
    with pytest.raises(Cancelled):
        launch.up(file, [], Stop(), detach=detach, announce=launch.announce)
    first.acquire()  # a start that fails releases the name
    first.release()


@pytest.mark.parametrize("broken", ["[]", "{}", '{"num_attention_heads": 0, "hidden_size": 8, "num_hidden_layers": 1}'])
def test_an_unusual_config_is_left_to_the_worker(tmp_path, broken):
    (tmp_path / "config.json").write_text(broken)
    (file := tmp_path / "c.yaml").write_text(OK_FILE % tmp_path)
    check_sizes(load_config(file, ["decode.kv_memory=1KiB"]), ())


@pytest.mark.parametrize("ray", ["local", "none"])
@pytest.mark.parametrize(
    ("sets", "wrong"),
    [
        (["decode.listen=127.0.0.1:7", "decode.replicas=2"], "decode.listen: 127.0.0.1:7 is for one worker.*up to 2;"),
        (["prefill.metrics=127.0.0.1:7", "prefill.autoscale={min: 1, max: 3}"], "prefill.metrics: .*up to 3; choose"),
        (["decode.metrics=127.0.0.1:7", "prefill.metrics=127.0.0.1:7"], "prefill.metrics: .*is also decode.metrics"),
        (["decode.listen=127.0.0.1:7", "router.admin=127.0.0.1:7"], "router.admin: 127.0.0.1:7 is also decode.listen"),
    ],
)
def test_workers_of_one_host_have_ports_of_their_own(tmp_path, monkeypatch, sets, wrong, ray):
    monkeypatch.setattr(ports, "port_problem", lambda address: "")
    (file := tmp_path / "c.yaml").write_text(OK_FILE % DEMO)
    with pytest.raises(ConfigError, match=wrong):
        check_ports(load_config(file, [f"ray.address={ray}", *sets]))
    elsewhere = load_config(file, ["ray.address=10.0.0.1:6379", "redis.url=redis://10.0.0.1:6379", *sets[:1]])
    check_ports(elsewhere)  # one worker per host may have a port


def test_an_address_in_use_is_found_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "home"))
    (file := tmp_path / "c.yaml").write_text(OK_FILE % DEMO)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = f"router.http: cannot listen on 127.0.0.1:{port}: Address already in use; choose another port"
        item = f"router.http=127.0.0.1:{port}"
        for detach in (False, True):
            with pytest.raises(ConfigError, match=f"^--set {item}: {text}"):
                launch.up(file, [item], Stop(), detach=detach, announce=launch.announce)
    check_ports(load_config(file, [item]))
    everywhere = [item, f"router.metrics='[::]:{port}'", "security.allow_insecure=true"]
    with pytest.raises(ConfigError, match=r"is also router\.http"):
        check_ports(load_config(file, everywhere))
    with pytest.raises(ConfigError, match=r"router\.http: cannot listen on no-such-host\.invalid:1"):
        check_ports(load_config(file, ["router.http=no-such-host.invalid:1", "security.allow_insecure=true"]))
    both = [item, f"router.metrics=127.0.0.1:{port}"]
    with pytest.raises(ConfigError, match=f"router.metrics: 127.0.0.1:{port} is also router.http"):
        check_ports(load_config(file, both))
    running = [Mock()]
    running[0].name = "x"
    monkeypatch.setattr(ports, "running_clusters", lambda: running)
    check_ports(load_config(file, both))  # the lock of the running cluster has a better message
    assert not (tmp_path / "home").exists()
