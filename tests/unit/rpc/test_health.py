"""The health service: a watching client that does not read holds up neither the status nor other clients."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from baton.rpc.health import Health, Status
from tests.support.waiting import until


class Client:
    """The server's side of one call. A `stuck` client takes no message."""

    def __init__(self, *, stuck: bool = False) -> None:
        self.stuck, self.seen = stuck, list[int]()

    async def write(self, message: Status) -> None:
        self.seen.append(message.status)
        if self.stuck:
            await asyncio.Event().wait()

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise LookupError(code, details)


def asked(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


async def test_a_client_that_does_not_read_holds_up_nothing():
    health, stuck, reading = Health(), Client(stuck=True), Client()
    health.set("x", serving=True)
    watches = [asyncio.create_task(health.Watch(asked("x"), client)) for client in (stuck, reading)]
    await until(lambda: stuck.seen and reading.seen, "both have the first status")
    health.set("x", serving=False)
    assert (await health.Check(asked("x"), Client())).status == Status.NOT_SERVING
    await until(lambda: reading.seen == [Status.SERVING, Status.NOT_SERVING], "the change")
    health.set("x", serving=True)
    health.stop()
    for service in ("", "x"):
        assert (await health.Check(asked(service), Client())).status == Status.NOT_SERVING
    for watch in watches:
        watch.cancel()
    assert stuck.seen == [Status.SERVING]


async def test_an_unknown_service_is_not_found_and_may_be_watched_until_it_exists():
    health, client = Health(), Client()
    with pytest.raises(LookupError, match="NOT_FOUND"):
        await health.Check(asked("x"), client)
    watch: Any = asyncio.create_task(health.Watch(asked("x"), client))
    await until(lambda: client.seen == [Status.SERVICE_UNKNOWN], "unknown")
    health.set("x", serving=True)
    await until(lambda: client.seen == [Status.SERVICE_UNKNOWN, Status.SERVING], "known")
    watch.cancel()
