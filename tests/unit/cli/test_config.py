"""No password is shown in any form of a Redis URL. Overrides reach a detached process."""

import pytest

from baton import __version__
from baton.cli.cluster.launch import as_environment, as_options
from baton.cli.cluster.serve import router_settings
from baton.cli.setup.config import effective
from baton.config import ClusterConfig, load_config
from baton.network import redacted


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
