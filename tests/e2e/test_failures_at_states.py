"""SIGKILL and SIGSTOP of workers, Redis and links at each state of a handoff, under load, one after the other.

Afterwards no request hangs, no token was wrong, later requests are answered, and nothing is held. `baton down` leaves
nothing, and all histories are in order. Each failure hits its state exactly, even one of a millisecond
(`failures_strikes.py`). The seed decides their order. Speed does not matter: a worker that is too slow to keep its
lease is replaced, like one that was hit.
"""

import itertools
import random
import time
from contextlib import closing, contextmanager

import pytest

from tests.e2e.failures_proxy import HERE, Proxy
from tests.e2e.failures_strikes import Field, KeptRedis
from tests.support.cluster_process import HANDED_OVER
from tests.support.load import Load, draw_jobs, until
from tools.history_check import check

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]  # five minutes in all

LEASE_S = 2.0
BRIEF_S = LEASE_S / 5
# Make each state last: prompts take many steps, few run at a time, and their KV leaves in many small frames.
SLOWLY = f"""
    {HANDED_OVER} router.queue.max_wait_s=30 ledger.lease_s={LEASE_S} ledger.heartbeat_s={LEASE_S / 5}
    model.path=oracle model.max_model_len=512 decode.replicas=2 decode.kv_memory=256KiB
    prefill.replicas=2 prefill.max_batched_tokens=16 prefill.max_running=2 transfer.verify=kv
    transfer.frame_size=512 transfer.coalesce_below=512 transfer.credits=2 transfer.frame_deadline_s=2
""".split()


def shuffled(seed, *choices):
    """Return all combinations, numbered, in an order that depends on the seed."""
    found = list(itertools.product(*choices))
    random.Random(seed).shuffle(found)
    return enumerate(found)


def lasts(seconds):
    """Wait for the duration of a failure."""
    time.sleep(seconds)


@contextmanager
def under_load(home, folder, seed, *sets):
    """Run a cluster with clients. At the end, census, processes and histories show nothing left."""
    jobs = draw_jobs(random.Random(seed))
    with home.cluster("configs/no-ray.yaml", *SLOWLY, *sets, f"history={folder}") as cluster:
        with closing(Field(cluster, folder)) as field, Load(cluster, jobs, seed) as load:
            load.settle(answers=8)
            yield field, load
            until("all workers are there", lambda: len(field.lives()) == 4)
            load.settle(answers=8)
        until("all is let go", lambda: cluster.nothing_is_held(4))
        said = home.baton("status", "--census", "--name", cluster.name, check=True).stdout
        assert said.count("held: no handoff") == 4, said
    report = check([folder])
    assert [str(violation) for violation in report.violations] == []


# --- workers


def killed(field, life, victim):
    victim.kill()


def stopped_briefly(field, life, victim):
    """Leave the process stopped for less than a lease. It usually survives, with its requests."""
    lasts(BRIEF_S)


def stopped_for_long(field, life, victim):
    """Leave the process stopped until its lease lapses. It then drops everything and ends."""
    until(f"the lease of {life} has lapsed", lambda: not field.has_lease(life))
    victim.go_on()
    until(f"{life} has ended", lambda: victim.ended)
    assert field.diary(life).read()["lease_lost"] == 1


STRIKES = (killed, stopped_briefly, stopped_for_long)
STATES = {"prefill": ("queued", "prefilling", "pushing"), "decode": ("reserved", "receiving", "decoding")}


def test_workers(home, tmp_path, seed):
    """Prefill and decode workers take turns: while one is replaced, the next one is hit."""
    orders = [shuffled(f"{seed} {role}", STRIKES, [role], STATES[role]) for role in STATES]
    with under_load(home, tmp_path / "history", seed) as (field, load):
        for turn, (strike, role, state) in itertools.chain(*zip(*orders, strict=True)):
            with field.caught(f"{role}-{turn % 2}", state) as (life, victim):
                print(f"{life} is {strike.__name__}, {state}")
                strike(field, life, victim)
            load.settle()


# --- the ledger

SILENCES = {"killed": 0.0, "silent briefly": BRIEF_S, "silent for long": 1.25 * LEASE_S}
WHILE = (("prefill", "pushing"), ("decode", "reserved"), ("decode", "decoding"))


def test_redis(home, tmp_path, seed):
    """Redis is killed and comes back empty, or is silent for less or more than a lease. No request needs it then."""
    redis = KeptRedis(tmp_path / "redis")
    sets = (f"redis.url={redis.url}", "transfer.transport=gloo")
    with closing(redis), under_load(home, tmp_path / "history", seed, *sets) as (field, load):
        for turn, (kind, (role, state)) in shuffled(seed, SILENCES, WHILE):
            with field.caught(f"{role}-{turn % 2}", state) as (life, _):
                print(f"redis is {kind}, {life} is {state}")
                redis.strike(silent=kind != "killed")
            lasts(SILENCES[kind])
            redis.go_on()
            load.settle()
            until("all have their leases", lambda: all(map(field.has_lease, field.lives().values())))
        if '"worker_lost"' not in field.cluster.log("router"):  # no machine was too slow
            assert set(load.outcomes) <= {"whole", "left"}


# --- the link

FAILURES = ("cut", "stopped briefly", "stopped for long")
DURING = (("prefill", "pushing"), ("decode", "reserved"), ("decode", "receiving"))


def test_the_link(home, tmp_path, seed):
    """Links of one worker to the other role are cut or silent. The router learns of that only from the workers."""
    redis, struck = KeptRedis(tmp_path / "redis"), 0
    sets = (f"redis.url={redis.url}", "transfer.transport=grpc", f"decode.advertise={HERE}")
    with (
        closing(redis),
        Proxy(redis.url) as proxy,
        under_load(home, tmp_path / "history", seed, *sets) as (field, load),
    ):
        for turn, (kind, (role, state)) in shuffled(seed, FAILURES, DURING):
            with field.caught(f"{role}-{turn % 2}", state) as (life, _):
                links = field.links(life)
                found = proxy.strike(links, silent=kind != "cut")
                print(f"{found} links of {life} are {kind}, which is {state}")
            if kind == "stopped briefly":
                lasts(BRIEF_S)
            elif kind == "stopped for long":
                until("a push was given up", links.failed)
            proxy.go_on()
            load.settle()
            struck += found
    assert struck > 0
