"""The folder of a router's own socket is removed by its router or the next one."""

import asyncio
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from baton.errors import ConfigError
from router.openai.loopback import LoopbackListener

KILLED = """
import asyncio
from router.openai.loopback import LoopbackListener

async def main():
    inner = LoopbackListener([])
    print(inner.bind(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def place(monkeypatch):
    """The folder for temporary folders; short because socket paths are limited."""
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        yield Path(short)


def names(place):
    return sorted(path.name for path in place.iterdir())


def bound():
    """Bind and stop a listener. Return its folder, and all folders that existed while it was bound."""

    async def bind_and_stop():
        inner = LoopbackListener([])
        folder = Path(inner.bind().removeprefix("unix:")).parent
        there = names(folder.parent)
        await inner.stop(None)
        return folder.name, there

    return asyncio.run(bind_and_stop())


def test_what_a_killed_router_left_is_removed_by_the_next_one(place):
    environment = {**os.environ, "TMPDIR": str(place), "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.Popen([sys.executable, "-c", KILLED], env=environment, stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    left = Path(killed.stdout.readline().strip().removeprefix("unix:")).parent.name
    own, there = bound()
    assert there == sorted([left, own]), "its router runs"
    killed.kill()
    killed.communicate()
    assert names(place) == [left]
    own, there = bound()
    assert there == [own]
    assert names(place) == []


def test_what_is_not_left_by_a_router_stays(place):
    """A folder in use stays: in another container its process has another id."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        gone = ended.pid
    kept = [f"baton-router-{number}-a" for number in (os.getpid(), "9" * 10, "x")]
    kept += ["baton-router-", f"other-{gone}-a", f"baton-router-{gone}-used", f"baton-router-{gone}-open"]
    for name in (*kept, f"baton-router-{gone}-left"):
        (place / name).mkdir(0o755 if name.endswith("open") else 0o700)
    (place / f"baton-router-{gone}-link").symlink_to(place / kept[0])
    (place / f"baton-router-{gone}-file").touch(0o700)
    kept += [f"baton-router-{gone}-link", f"baton-router-{gone}-file"]
    used = os.open(place / f"baton-router-{gone}-used", os.O_RDONLY)
    try:
        fcntl.flock(used, fcntl.LOCK_EX)
        own, there = bound()
    finally:
        os.close(used)
    assert there == sorted([*kept, own])


def test_where_there_is_no_place_it_says_so(place, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(place / "nowhere"))
    with pytest.raises(ConfigError, match=r"router\.http: cannot create a folder for its socket, set TMPDIR"):
        bound()
