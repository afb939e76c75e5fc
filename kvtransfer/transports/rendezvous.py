"""How the two ends of a channel find each other: a few keys over the Peer stream, and the name of a host."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from baton.errors import ConfigError
from baton.hashing import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtransfer.transports.base import ChannelName, KeyRelay

_KEY_POLL_S = 0.0003  # a HashStore cannot be watched, only listed; polled while a pair is built, never later


def awaited_key(keys: KeyRelay, key: str, deadline_s: float) -> bytes:
    """The value of `key`, which the other side says next. Raises TimeoutError, ConnectionError for another key."""
    arrived = keys.receive(deadline_s)
    if arrived is None:
        raise TimeoutError(f"the other end did not say {key!r} within {deadline_s} s")
    if arrived[0] != key:
        raise ConnectionError(f"the other end said {arrived[0]!r} instead of {key!r}")
    return arrived[1]


def host_reach(*namespaces: str) -> str:
    """A name that all processes of this user share which run on this host, in the same kernel namespaces.

    Those of networks and users always count, `namespaces` beside them (as in /proc/self/ns). Raises ConfigError where
    Linux's /proc does not say.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        inodes = [str(Path(f"/proc/self/ns/{name}").stat().st_ino) for name in ("net", "user", *namespaces)]
    except OSError as error:
        raise ConfigError(f"works only on Linux, with /proc: {error}") from error
    return fingerprint([boot, str(os.geteuid()), *inodes])


@contextmanager
def relayed_store(name: ChannelName, keys: KeyRelay) -> Iterator[Store]:
    """A store whose keys of this side go to the peer, and the other way round, while the block runs."""
    store, known, built = HashStore(), set[str](), threading.Event()

    def send_new_keys() -> None:
        for key in set(store.list_keys()) - known:
            known.add(key)
            keys.send(key, store.get(key))

    def relay() -> None:
        while not built.is_set():
            send_new_keys()
            if (arrived := keys.receive(_KEY_POLL_S)) is not None:
                known.add(arrived[0])  # or it would be sent back
                store.set(*arrived)  # type: ignore[arg-type]  # bytes are right, the stub says str

    thread = threading.Thread(target=relay, name=f"kv-keys-{name}", daemon=True)
    thread.start()
    try:
        yield PrefixStore(str(name), store)
    finally:
        built.set()
        thread.join()
        send_new_keys()
