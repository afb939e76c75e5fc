"""constraints.txt pins everything that `make setup` installs, and this environment has these versions."""

import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("server", "gateway", "local", "dev")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: str) -> dict[str, str]:
    """Return the pinned version of each package in a constraints or requirements file."""
    lines = [line for line in (ROOT / path).read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "only exact public versions"
    return {canonical(name): version for name, version in (line.split("==") for line in lines)}


def needed(name: str, extras: tuple[str, ...] = ()) -> set[str]:
    """Return every installed distribution that `name[extras]` needs, directly or not."""
    todo, seen = [(name, extras)], set[tuple[str, tuple[str, ...]]]()
    while todo:
        current, wanted = todo.pop()
        for requirement in map(Requirement, metadata.requires(current) or []):
            key = canonical(requirement.name), tuple(sorted(requirement.extras))
            marker = requirement.marker
            applies = marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *wanted))
            if applies and key not in seen and _installed(key[0]):
                seen.add(key)
                todo.append(key)
    return {distribution for distribution, _ in seen}


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def test_everything_needed_is_pinned_and_installed_so():
    pinned = pins("constraints.txt")
    installed = {name: metadata.version(name).split("+")[0] for name in needed("baton-serve", EXTRAS)}
    assert {
        name: (version, pinned.get(name)) for name, version in installed.items() if pinned.get(name) != version
    } == {}
    assert "grpcio-tools" in pins("tools/proto-requirements.txt")
