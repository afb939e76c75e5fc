"""Stand-in for NIXL's bindings within one process. It behaves as the source of NIXL 1.5.

Read in src/bindings/python/nixl_bindings.cpp, src/core/nixl_agent.cpp and src/plugins/ucx/ucx_backend.cpp:
- All functions raise an error of the bindings with the name of the status (`throw_nixl_exception`); these are derived
  from Exception alone (`py::register_exception`).
- `createXferReq` returns NIXL_ERR_INVALID_PARAM for lists of different lengths or bytes, and NIXL_ERR_NOT_FOUND for an
  unknown agent or memory that is not registered.
- An agent without a progress thread moves bytes only within its own calls (`nixlUcxWorker::progressLoop`), in no
  promised order of the pieces. UCX cuts a read into segments. The flush request keeps a transfer in progress until all
  of it has ended.
- A transfer from a dead peer raises NIXL_ERR_REMOTE_DISCONNECT; one from a frozen peer stays in progress.
- `releaseXferReq` of a transfer in progress succeeds ("it may not be enough to cancel UCX request"): its bytes may
  still arrive while the agent lives.
"""

import ctypes
import os
import random
from collections.abc import Callable

import numpy as np

from kvtransfer.transports.nixl import Staging
from kvtransfer.transports.nixl_agent import serve

SEGMENT = 256  # bytes; few, so that tests can strike between them


class Agents:
    """All agents of a test, and the numbers of segments that were read and of handles that are not released. `before`
    runs before each segment, with its number.
    """

    def __init__(self) -> None:
        self.known: dict[bytes, Agent] = {}
        self.configs: set[str] = set()
        self.segments = self.handles = 0
        self.before: Callable[[int], None] = lambda segment: None
        self.flip = -1  # number of a segment that arrives with a changed byte
        self.frozen = self.dead = False

    def serve(self, library: "Library", staging: Staging, config: str) -> "Served":
        return Served(library, staging, config)


def held_by(staging: Staging) -> int:
    """Return the bytes of memory that staging occupies."""
    return os.fstat(staging._file).st_blocks * 512


class Served:
    """Staging that is registered with an agent of this process."""

    ended = False

    def __init__(self, library: "Library", staging: Staging, config: str) -> None:
        with staging.readable() as file:
            self._agent, self._memory = serve(library, file, config)

    def where(self, deadline_s: float) -> tuple[int, bytes]:
        return self._memory.ctypes.data, self._agent.getLocalMD()


class Config:
    useProgThread = True
    pthrDelay = 0


class Library:
    """The bindings. The errors are classes of their own, as there."""

    DRAM_SEG, NIXL_READ, NIXL_SUCCESS, NIXL_IN_PROG = "DRAM", "READ", 0, 1
    nixlAgentConfig = Config
    (
        nixlBackendError,
        nixlRemoteDisconnectError,
        nixlNotFoundError,
        nixlInvalidParamError,
        nixlMismatchError,
        nixlNotAllowedError,
        nixlNotSupportedError,
        nixlCancelledError,
        nixlUnknownError,
    ) = (
        type(f"nixl{name}Error", (Exception,), {})
        for name in (
            "Backend",
            "RemoteDisconnect",
            "NotFound",
            "InvalidParam",
            "Mismatch",
            "NotAllowed",
            "NotSupported",
            "Cancelled",
            "Unknown",
        )
    )

    def __init__(self, agents: Agents) -> None:
        self.agents = agents

    def nixlAgent(self, name: str, config: Config) -> "Agent":
        return Agent(self, name)

    @staticmethod
    def nixlRegDList(kind: str, descriptors: list[tuple[int, int, int, str]]) -> list[tuple[int, int]]:
        return [(address, nbytes) for address, nbytes, _, _ in descriptors]

    @staticmethod
    def nixlXferDList(kind: str, descriptors: np.ndarray) -> list[tuple[int, int]]:
        assert descriptors.dtype == np.uint64
        assert descriptors.shape[1] == 3
        return [(int(address), int(nbytes)) for address, nbytes, _ in descriptors]


class Agent:
    def __init__(self, library: Library, name: str) -> None:
        self._library, self._agents = library, library.agents
        self._name, self._backend = name.encode() + b"%d" % id(self), False
        self.registered: list[tuple[int, int]] = []
        self._peers: set[bytes] = set()
        self._created: dict[int, list[tuple[int, int, int]]] = {}
        self._moving: dict[int, list[tuple[int, int, int]]] = {}
        self._handles = 0

    def createBackend(self, kind: str, parameters: dict[str, str]) -> None:
        self._agents.configs |= {parameters["engine_config"]} if "engine_config" in parameters else set()
        if "NET_DEVICES=none" in parameters.get("engine_config", ""):
            raise self._library.nixlBackendError("NIXL_ERR_BACKEND")
        self._backend = kind == "UCX"

    def registerMem(self, memory: list[tuple[int, int]], backends: list[int]) -> None:
        assert self._backend
        self.registered += memory

    def getLocalMD(self) -> bytes:
        self._agents.known[self._name] = self
        return self._name

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        if metadata not in self._agents.known:
            raise self._library.nixlMismatchError("NIXL_ERR_MISMATCH")
        self._peers.add(metadata)
        return metadata

    def invalidateRemoteMD(self, peer: bytes) -> None:
        self._peers.discard(peer)

    def createXferReq(self, kind, local, remote, peer: bytes, message: bytes, backends: list[int]) -> int:
        if [nbytes for _, nbytes in local] != [nbytes for _, nbytes in remote]:
            raise self._library.nixlInvalidParamError("NIXL_ERR_INVALID_PARAM")
        if peer not in self._peers or not (self._has(local) and self._agents.known[peer]._has(remote)):
            raise self._library.nixlNotFoundError("NIXL_ERR_NOT_FOUND")
        self._handles += 1
        self._agents.handles += 1
        self._created[self._handles] = [
            (here + at, there + at, min(SEGMENT, n - at))
            for (here, n), (there, _) in zip(local, remote, strict=True)
            for at in range(0, n, SEGMENT)
        ]
        return self._handles

    def postXferReq(self, handle: int, message: bytes) -> int:
        self._moving[handle] = self._created.pop(handle)
        random.shuffle(self._moving[handle])
        if self._agents.dead:
            raise self._library.nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
        return self._library.NIXL_IN_PROG

    def getXferStatus(self, handle: int) -> int:
        """Move one segment of each transfer."""
        for segments in self._moving.values():
            if segments:
                self._agents.before(self._agents.segments)
            if self._agents.dead:
                raise self._library.nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
            if segments and not self._agents.frozen:
                self._agents.segments += 1
                self._move(*segments.pop())
        return self._library.NIXL_IN_PROG if self._moving[handle] else self._library.NIXL_SUCCESS

    def _move(self, here: int, there: int, nbytes: int) -> None:
        ctypes.memmove(here, there, nbytes)
        if self._agents.segments - 1 == self._agents.flip:
            ctypes.c_ubyte.from_address(here).value ^= 1

    def releaseXferReq(self, handle: int) -> None:
        """Free a handle. Bytes of a transfer in progress go on, as long as the agent is called."""
        self._agents.handles -= 1
        self._created.pop(handle, None)

    def _has(self, pieces: list[tuple[int, int]]) -> bool:
        return all(
            any(first <= address and address + nbytes <= first + size for first, size in self.registered)
            for address, nbytes in pieces
        )
