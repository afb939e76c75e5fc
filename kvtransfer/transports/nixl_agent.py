"""NIXL agents, and the process that answers reads of staging:

    python -m kvtransfer.transports.nixl_agent BINDINGS FILE CONFIG
It answers each line with the address of the staging and the agent's metadata, and ends when its standard input is
closed. Over TCP, UCX answers reads in software (NIXL 1.5.1): it sends whatever address a peer asks for, and a reader
that dies in the middle can crash it. This process contains both, because it has nothing but the staging, read-only.
It does not import torch.

The agents use NIXL's bindings. `nixl_agent` of its Python API fixes `pthrDelay = 0`, with which the progress thread
occupies a core.
"""

from __future__ import annotations

import importlib
import logging
import mmap
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

import numpy as np

_DELAY_US = 10_000  # between looks of the progress thread at sockets that did not wake it
# Read by UCX when it is loaded. It prints to standard output, and replaces handlers of signals.
_QUIET = {"UCX_LOG_LEVEL": "error", "UCX_LOG_FILE": "stderr", "UCX_HANDLE_ERRORS": "none"}


def load(bindings: str) -> ModuleType:
    """Import NIXL's bindings without a lasting effect on others in this process. Raises ImportError."""
    raises, added = logging.raiseExceptions, _QUIET.keys() - os.environ.keys()
    os.environ.update({name: _QUIET[name] for name in added})
    try:
        if bindings == "nixl._bindings":
            importlib.import_module("nixl")  # selects the bindings for the CUDA version of torch
        return importlib.import_module(bindings)
    finally:
        logging.raiseExceptions = raises  # the import switches it off
        for name in added:
            del os.environ[name]


def tcp_on(interface: str) -> str:
    """Return settings of UCX for TCP on this interface alone; UCX would take any. NIXL gives variables such as
    UCX_NET_DEVICES precedence. UCX's own segments have 8 KiB.
    """
    return f"NET_DEVICES={interface},TLS=tcp,TCP_TX_SEG_SIZE=64k,TCP_RX_SEG_SIZE=64k"


@contextmanager
def translated(library: Any) -> Iterator[None]:
    """Raise ConnectionError with the text of NIXL's error. The bindings derive their errors from Exception."""
    try:
        yield
    except (
        *(library.nixlBackendError, library.nixlRemoteDisconnectError, library.nixlNotFoundError),
        *(library.nixlInvalidParamError, library.nixlMismatchError, library.nixlNotAllowedError),
        *(library.nixlNotSupportedError, library.nixlCancelledError, library.nixlUnknownError),
    ) as error:
        text = str(error)
    else:
        return
    raise ConnectionError(f"NIXL: {text}")


def make_agent(library: Any, config: str, *, answers: bool = False) -> Any:
    """Return a new agent. One that `answers` has a thread; any other one moves bytes only during calls of its owner.
    `config` has settings of UCX, `KEY=VALUE,...`; variables of the environment precede them. Raises ConnectionError.
    """
    options = library.nixlAgentConfig()
    options.useProgThread, options.pthrDelay = answers, _DELAY_US
    with translated(library):
        agent = library.nixlAgent(f"baton-{secrets.token_hex(16)}", options)
        agent.createBackend("UCX", {"engine_config": config})
    return agent


def register(library: Any, agent: Any, address: int, nbytes: int) -> None:
    """Register main memory. Raises ConnectionError."""
    with translated(library):
        agent.registerMem(library.nixlRegDList(library.DRAM_SEG, [(address, nbytes, 0, "")]), [])


def serve(library: Any, file: int, config: str) -> tuple[Any, np.ndarray]:
    """Let readers see the staging in `file` while the returned agent and memory exist."""
    mapping = mmap.mmap(file, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    memory = np.frombuffer(mapping, dtype=np.uint8)
    agent = make_agent(library, config, answers=True)
    register(library, agent, memory.ctypes.data, memory.nbytes)
    return agent, memory


def main(bindings: str, file: str, config: str) -> None:
    """Serve the staging in `file` until standard input is closed."""
    answer = os.dup(1)
    os.dup2(2, 1)  # libraries print to standard output
    agent, memory = serve(load(bindings), int(file), config)
    found = f"{memory.ctypes.data} {agent.getLocalMD().hex()}\n".encode()
    with suppress(BrokenPipeError):  # the worker has ended
        for _ in sys.stdin:
            os.write(answer, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
