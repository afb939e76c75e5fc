"""Rendezvous of a channel's two ends: a few keys over the Peer stream, and the identity of a host."""

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

_KEY_POLL_S = 0.0003  # a HashStore cannot be watched, only listed; polled only while a pair is built


def awaited_key(keys: KeyRelay, key: str, deadline_s: float) -> bytes:
    """Return the value of `key`, the peer's next key. Raises TimeoutError, or ConnectionError for another key."""
    arrived = keys.receive(deadline_s)
    if arrived is None:
        raise TimeoutError(f"the peer did not send {key!r} within {deadline_s} s")
    if arrived[0] != key:
        raise ConnectionError(f"the peer sent {arrived[0]!r} instead of {key!r}")
    return arrived[1]


def host_reach(*namespaces: str) -> str:
    """Return a name that this user's processes share on this host, in the same network, user and given namespaces.
    `namespaces` are names as in /proc/self/ns. Raises ConfigError without Linux's /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        inodes = [str(Path(f"/proc/self/ns/{name}").stat().st_ino) for name in ("net", "user", *namespaces)]
    except OSError as error:
        raise ConfigError(f"works only on Linux, with /proc: {error}") from error
    return fingerprint([boot, str(os.geteuid()), *inodes])


@contextmanager
def relayed_store(name: ChannelName, keys: KeyRelay) -> Iterator[Store]:
    """Yield a store that exchanges its keys with the peer's store while the block runs."""
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
                store.set(*arrived)  # type: ignore[arg-type]  # bytes are right, the stub has str

    thread = threading.Thread(target=relay, name=f"kv-keys-{name}", daemon=True)
    thread.start()
    try:
        yield PrefixStore(str(name), store)
    finally:
        built.set()
        thread.join()
        send_new_keys()
