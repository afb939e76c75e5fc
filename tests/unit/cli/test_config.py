"""No password is shown, in whichever form Redis URLs allow it; overrides survive the way into a detached process."""

import pytest

from baton.cli.config import effective, hide_password
from baton.cli.roles import router_settings
from baton.cli.up import as_environment, as_options
from baton.config import ClusterConfig, load_config


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
    assert hide_password(url) == shown
    config = ClusterConfig.model_validate({"redis": {"url": url}})
    assert effective(config)["redis"] == {"url": shown}
    assert "cret" not in str(effective(config))


SETS = ["redis.url=redis://:s3=cret@h:1/0", "decode.replicas=2", " router.queue.max_wait_s = 2.5", "name=other"]


def test_overrides_say_the_same_as_variables(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: oracle}\nprefill: {replicas: 3}\n")
    mine = {"BATON__PREFILL__REPLICAS": "4", "BATON__NAME": "mine", "HOME": "/"}
    env = as_environment(SETS, mine)
    assert load_config(file, (), env) == load_config(file, SETS, mine)
    assert "HOME" not in env


def test_overrides_that_no_variable_can_say_go_by_the_command_line(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: oracle}\nrouter: {tenants: {Else: 2}}\n")
    sets = [*SETS, "router.tenants={x: 1}", "router.tenants.TeamA=3", "router.tenants.a__b=4"]
    env, options = as_environment(sets, {}), as_options(sets)
    assert load_config(file, options, env) == load_config(file, sets)
    assert options == ["router.tenants.TeamA=3", "router.tenants.a__b=4"]
    assert not any("cret" in option for option in options)


def test_a_router_is_told_how_often_a_request_is_tried():
    assert router_settings(ClusterConfig()).attempts == 3
    settings = router_settings(ClusterConfig.model_validate({"slo": {"ttft_ms": 250, "itl_ms": 20}}))
    assert (settings.policy, settings.slo_ttft_s, settings.slo_itl_s) == ("predicted", 0.25, 0.02)
    assert router_settings(ClusterConfig.model_validate({"retry": {"attempts": 5}})).attempts == 5


def test_decode_workers_compute_prompts_where_that_is_sooner_unless_they_never_may():
    assert router_settings(ClusterConfig()).local_prefill
    assert not router_settings(ClusterConfig.model_validate({"router": {"local_prefill": "never"}})).local_prefill


def test_a_router_is_told_whether_models_think_while_they_decode():
    assert not router_settings(ClusterConfig()).think_while_decoding
    config = ClusterConfig.model_validate({"thinking": {"while_decoding": True}})
    assert router_settings(config).think_while_decoding


def test_a_router_is_told_who_may_wait():
    queue = {"max_requests": 5, "max_tokens": 600, "max_wait_s": 2.5}
    config = ClusterConfig.model_validate({"router": {"queue": queue, "tenants": {"team-a": 3}}})
    settings = router_settings(config)
    assert (settings.queue_max_requests, settings.queue_max_tokens, settings.queue_max_wait_s) == (5, 600, 2.5)
    assert settings.tenants == {"team-a": 3.0}


def test_a_router_is_told_its_version_and_when_a_silent_worker_is_lost():
    ledger = {"lease_s": 6.0, "heartbeat_s": 2.0}
    settings = router_settings(ClusterConfig.model_validate({"ledger": ledger}))
    assert settings.version.count(".") == 2
    assert settings.worker_silence_s == 6.0
