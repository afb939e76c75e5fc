"""This process's use of a Ray: one of its own, on this machine, or another's.

A local Ray listens on the loopback only, has no dashboard, and asks for a token that lives as long as this process.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton.cluster.processes import StartError
from baton.errors import Cancelled, NoWorker

LOCAL = "local"
CONNECT_S = 5.0
OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MB; nothing of ours goes through it

# Read by Ray when it is imported or started. The third makes a local Ray use 127.0.0.1 and nothing else.
LOCAL_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def namespace(cluster: str) -> str:
    """Of the actors of a cluster; their names are the workers' ids."""
    return f"baton-{cluster}"


def start_local(scratch: Callable[[], Path], cluster: str) -> Any:
    """Start a Ray that ends with this process; the module `ray`. `scratch` makes its folder, whose path must be short,
    since it holds unix sockets (107 bytes). Raises StartError, Cancelled.
    """
    os.environ.update(LOCAL_ENVIRONMENT)
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    options: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "num_cpus": 1}
    try:
        return _init(LOCAL, namespace=namespace(cluster), _temp_dir=str(scratch()), **options)
    except ConnectionError as error:
        raise StartError(f"ray.address: Ray did not start: {error}") from error


def connect(address: str, cluster: str) -> Any:
    """Join the Ray at `address`; the module `ray`. Raises NoWorker, Cancelled."""
    check_reachable(address)
    try:
        return _init(address, namespace=namespace(cluster))
    except ConnectionError as error:
        raise NoWorker(f"ray.address: no use of the Ray at {address!r}: {error}") from error


def _init(address: str, **options: Any) -> Any:
    """Raises ConnectionError, Cancelled."""
    import ray

    ours = signal.getsignal(signal.SIGTERM)
    options |= {"configure_logging": False, "logging_level": logging.ERROR, "log_to_driver": False}
    try:
        ray.init(address=address, **options)
    except SystemExit:
        raise Cancelled("stopped while Ray was starting") from None
    except Exception as error:  # a process boundary: whatever Ray raises, there is no Ray
        ray.shutdown()  # also of one that did not start to the end
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
    finally:
        signal.signal(signal.SIGTERM, ours)  # Ray puts one of its own there, which ends the process undrained
    return ray


def check_reachable(address: str) -> None:
    """Ray itself would try for minutes. Raises NoWorker."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise NoWorker(f"ray.address: nothing answers at {address}: {error}") from None


def this_ray() -> Any:
    """The module `ray` in a process that Ray started."""
    import ray

    return ray
