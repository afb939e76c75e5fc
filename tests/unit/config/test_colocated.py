"""`mode: colocated`: all workers of both pools are alike, and nothing but the size of the prefill pool counts."""

import pytest
import yaml

from baton.config import config_from_json
from baton.core import Role
from baton.errors import ConfigError

FILE = """
model: {path: oracle}
prefill: {replicas: 3, threads: 4, max_running: 7, kv_memory: 1GiB}
decode: {replicas: 2, threads: 1, max_batched_tokens: 96}
"""


def test_as_many_workers_as_both_pools_have_all_as_decode_says(load):
    config = load(FILE, "mode=colocated")
    assert (config.prefill.replicas, config.decode.replicas) == (0, 5)
    assert config.decode == load(FILE).decode.model_copy(update={"replicas": 5})
    assert (config.prefill.threads, config.prefill.max_running) == (1, 64), "nobody may go by what was said of it"


def test_what_was_loaded_is_loaded_again_as_it_is(load):
    """The supervisor writes it into the state folder, a controller of others is told it as JSON."""
    config = load(FILE, "mode=colocated", "decode.autoscale.max=4")
    assert load(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True))) == config
    assert config_from_json(config.model_dump_json()) == config


def test_where_the_other_pool_listens_is_nobodys_business(load):
    """Nor is it after the first time, when it is said to listen where these workers do."""
    open_ = ["decode.listen=0.0.0.0:0", "decode.metrics=0.0.0.0:9101", "prefill.listen=0.0.0.0:1"]
    allowed = "security.allow_insecure=[decode.listen, decode.metrics, transfer.transport]"
    config = load(FILE, "mode=colocated", *open_, allowed)
    assert load(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True))) == config
    assert config_from_json(config.model_dump_json()) == config
    with pytest.raises(ConfigError, match=r"prefill\.listen \(0\.0\.0\.0:1\): listens beyond"):
        load(FILE, *open_, allowed)
    with pytest.raises(ConfigError, match=r"decode\.listen \(0\.0\.0\.0:0\): listens beyond"):
        load(FILE, "mode=colocated", *open_)


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
    config = load(FILE, "mode=colocated", *sets)
    assert config.bounds == {Role.DECODE: bounds}
    assert (config.decode.autoscale is None) is (not any("decode" in one for one in sets))


def test_no_prefill_worker_is_needed_with_it_and_with_it_alone(load):
    assert load(FILE, "mode=colocated", "prefill.replicas=0").decode.replicas == 2
    for sets in (["prefill.replicas=0"], ["mode=colocated", "decode.replicas=0"]):
        with pytest.raises(ConfigError, match=r"replicas: .*greater than 0"):
            load(FILE, *sets)


def test_both_are_no_more_than_a_pool_may_have(load):
    """What is written into the state folder must be loaded again."""
    assert load(FILE, "mode=colocated", "decode.replicas=4093").decode.replicas == 4096
    with pytest.raises(ConfigError, match=r"decode.replicas: must be at most 4096 with those of prefill, got 4097"):
        load(FILE, "mode=colocated", "decode.replicas=4094")


def test_otherwise_nothing_changes(load):
    config = load(FILE)
    assert config.by_mode() == config
    assert set(config.bounds) == set(Role)
