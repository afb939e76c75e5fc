"""A cluster on an external Redis: only its URL, a user limited to our keys, and the keys that remain in it."""

import pytest
import redis

from baton.ledger.embedded_redis import EmbeddedRedis
from baton.ledger.redis_client import COMMANDS
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow


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
