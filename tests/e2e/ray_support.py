"""A Ray cluster of several nodes on this machine. Each node has its own loopback address, like a host."""

import contextlib
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import psutil

from tests.support.cluster_process import is_zombie
from tests.support.processes_of_cluster import RayNodes

HEAD = "127.0.0.2"


class LoopbackNodes(RayNodes):
    """Nodes at 127.0.0.2 and the following addresses."""

    def __init__(self, redis_url: str) -> None:
        with socket.create_server((HEAD, 0)) as probe:
            super().__init__(HEAD, probe.getsockname()[1], redis_url)
        self.redis_url = redis_url
        self.env["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"
        self._hosts: dict[str, str] = {}

    def address_of(self, name: str) -> str:
        return self._hosts.setdefault(name, f"127.0.0.{2 + len(self._hosts)}")

    def launch(self, name: str, argv: list[str], log: Path) -> subprocess.Popen:
        with log.open("wb") as output:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            return subprocess.Popen(argv, env=os.environ | self.env, start_new_session=True, **streams)

    def actors(self, name: str) -> dict[int, str]:
        """Return the node's Ray actors: their titles in `ps`, by pid."""
        found = {}
        for process in psutil.Process(self.nodes[name].pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline()).strip()
                if title.startswith("ray::") and "Actor" in title and not is_zombie(process.pid):
                    found[process.pid] = title
        return found

    def no_actors(self) -> bool:
        return not any(self.actors(name) for name in self.nodes)

    def logs(self) -> str:
        files = sorted(self.folder.glob("session_*/logs/worker-*.err"))
        return "".join(f"\n== {file.name}\n{file.read_text()[-3000:]}" for file in files)

    def stop(self) -> None:
        for name in reversed(list(self.nodes)):
            self.kill(name)
        ours = str(self.folder)
        left = [one for one in psutil.process_iter(["cmdline"]) if ours in " ".join(one.info["cmdline"] or ())]
        for one in left:
            one.kill()
        shutil.rmtree(self.folder)
        assert not left
