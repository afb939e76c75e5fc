"""`baton logs`: what the processes of a cluster said, in the order of time."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from baton.cli.log_files import Line, LogFile
from baton.cluster.state_dir import StateFolder, baton_home, running_clusters
from baton.errors import NoWorker
from baton.logs import HARMLESS, LEVELS

if TYPE_CHECKING:
    from collections.abc import Callable

LINES = 100  # shown, if nobody says how many or since when
FOLLOW_S = 0.2
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
STYLES = {"debug": "dim", "info": "green", "warning": "yellow", "error": "red", "critical": "bold red"}
SHOWN_FIRST = ("timestamp", "level", "process", "event", "exception")  # in places of their own


@dataclass(slots=True)
class Wanted:
    """Which lines to show. `since` is Unix time. What is no event has no level, and may explain all of it."""

    request: str = ""
    worker: str = ""
    level: int = 0
    since: float = 0.0
    _names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._names |= {self.request} if self.request else set()

    def takes(self, line: Line) -> bool:
        asked = not self.request or (line.event is not None and self._of_request(line.event))
        if line.at < self.since or (self.worker and not self._of_worker(line)):
            return False
        return asked and (line.event is None or LEVELS.get(line.level.upper(), 0) >= self.level)

    def _of_worker(self, line: Line) -> bool:
        about = line.facts("worker", "workers")
        return self.worker == line.process or any(self.worker == name.partition("@")[0] for name in about)

    def _of_request(self, event: dict[str, object]) -> bool:
        """A request that was resumed has another name on the workers: its router says both, maybe in a line that is
        not to be shown.
        """
        name = str(event.get("request_id", ""))
        if _is_of(str(event.get("stream", "")), self.request) and name:
            self._names.add(name)
        return any(_is_of(name, wanted) for wanted in self._names)


def _is_of(name: str, request: str) -> bool:
    return name == request or name.startswith(f"{request}.")  # one of its choices


def parse_age(text: str) -> float:
    """Seconds: of `90`, `90s`, `5m`, `2h` or `1d`. Raises BadParameter (exit code 2)."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r}: must be a number and s, m, h or d, such as 5m", param_hint="--since")
    return float(found[1]) * UNITS[found[2] or "s"]


def find_logs(name: str | None) -> Path:
    """The folder of a cluster's logs, which outlive it; no name: of the only one running, or of the only one there is.

    Raises NoWorker naming those that there are.
    """
    home = baton_home()
    there = sorted(path.parent.name for path in home.glob("*/logs"))
    running = [state.name for state in running_clusters()]
    if name is None:
        among = running or there
        if len(among) == 1:
            return StateFolder(among[0]).logs
        problem = "no cluster has run here" if not among else "say which cluster with --name"
    elif name in there:
        return StateFolder(name).logs
    else:
        problem = f"there are no logs of a cluster called {name!r}"
    raise NoWorker(f"{problem}: {home} has {', '.join(there) or 'none'}")


def logs(name: str | None, wanted: Wanted, lines: int | None, *, follow: bool, as_json: bool) -> None:
    """Show the last `lines` that are wanted, and with `follow` what comes after them. Ends with KeyboardInterrupt."""
    folder = find_logs(name)
    most = lines if lines is not None else (None if wanted.since else LINES)
    files: dict[Path, LogFile] = {}
    show = _shower(as_json=as_json)
    _look(folder, files)
    if wanted.request:
        _learn_names(files.values(), wanted)
    for line in merged([file.last(wanted.takes, wanted.since, most) for file in files.values()], most):
        show(line)
    while follow:
        time.sleep(FOLLOW_S)
        _look(folder, files)
        for line in merged([[line for line in file.more() if wanted.takes(line)] for file in files.values()]):
            show(line)


def merged(parts: Iterable[Sequence[Line]], most: int | None = None) -> list[Line]:
    """By time; those of one file stay in its order. At most the last `most`."""
    lines = sorted((line for part in parts for line in part), key=lambda line: line.at)
    return lines if most is None else lines[len(lines) - min(most, len(lines)) :]


def _look(folder: Path, files: dict[Path, LogFile]) -> None:
    for path in sorted(folder.glob("*.log")):
        if path not in files:
            files[path] = LogFile(path)


def _learn_names(files: Iterable[LogFile], wanted: Wanted) -> None:
    """Who resumed it may have called it differently: routers say so when they accept it."""
    for file in files:
        if file.process.startswith("router"):
            for line in file.lines_with(wanted.request):
                wanted.takes(line)


def _shower(*, as_json: bool) -> Callable[[Line], None]:
    console = Console(highlight=False, soft_wrap=True)
    if as_json or not sys.stdout.isatty():
        return lambda line: _write(line.as_json())
    return lambda line: console.print(pretty(line))


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def pretty(line: Line) -> Text:
    """For a terminal: local time, who, what, and the facts."""
    moment = time.localtime(line.at)
    text = Text(f"{time.strftime('%H:%M:%S', moment)}.{int(line.at % 1 * 1000):03d} ", "dim")
    text.append(f"{line.process:<12} ", "cyan")
    if line.event is None:
        return text.append(line.text.translate(HARMLESS))
    text.append(f"{line.level:<8} ", STYLES.get(line.level, ""))
    text.append(str(line.event.get("event", "")).translate(HARMLESS), "bold")
    for key, value in _facts(line.event):
        text.append(f" {key}=", "dim").append(value)
    if exception := line.event.get("exception"):
        text.append(f"\n{exception}".translate(HARMLESS), "red")
    return text


def _facts(event: dict[str, object]) -> Iterator[tuple[str, str]]:
    for key, value in event.items():
        if key not in SHOWN_FIRST and value not in ("", None):
            plain = isinstance(value, str) and " " not in value
            text = str(value) if plain else json.dumps(value, separators=(",", ":"), ensure_ascii=False)
            yield key, text.translate(HARMLESS)
