"""The log lines of a process: its name, lines of libraries and crashes, and the copy on disk."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import logging, sys, threading, warnings
from pathlib import Path
import structlog
from baton.core import HandoffId, Incarnation, WorkerRef
from baton.logs import configure_logging
level, copy = sys.argv[1], sys.argv[2]
configure_logging(level, "json", "decode-0", Path(copy) if copy else None)
configure_logging(level, "json", "decode-0", Path(copy) if copy else None)  # again: nothing is said twice
log = structlog.get_logger()
ref = WorkerRef("prefill-0", Incarnation(3, 4), "host:1")
log.debug("below")
log.info("committed", handoff=HandoffId("r1", 2), worker=ref, path=Path("/x"))
logging.getLogger("some.library").warning("%d things", 3)
logging.getLogger("some.library").info("chatter")
warnings.warn("this is old")
def fail():
    raise ValueError("in a thread")
thread = threading.Thread(target=fail, name="worker")
thread.start()
thread.join()
raise KeyError("at the end")
"""


def ran(program: str, *args: str, stderr: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *args]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, check=False)


def run(level: str = "info", copy: str = "") -> list[dict[str, str]]:
    done = ran(PROGRAM, level, copy)
    assert done.returncode == 1
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_all_that_a_process_says_has_one_form():
    lines = run()
    assert [line["event"] for line in lines[:2]] == ["committed", "3 things"]
    assert [line["level"] for line in lines] == ["info", "warning", "warning", "critical", "critical"]
    assert {line["process"] for line in lines} == {"decode-0"}
    assert all(line["timestamp"].endswith("Z") for line in lines)
    committed, library, warning, thread, end = lines
    assert {key: committed[key] for key in ("request_id", "attempt", "worker", "path")} == {
        "request_id": "r1",
        "attempt": 2,
        "worker": "prefill-0@3.4",
        "path": "/x",
    }
    assert library["logger"] == "some.library"
    assert "this is old" in warning["event"]
    assert (thread["event"], thread["thread"]) == ("thread_failed", "worker")
    assert thread["exception"].endswith("ValueError: in a thread")
    assert end["event"] == "process_failed"
    assert end["exception"].endswith("KeyError: 'at the end'")


def test_a_terminal_obeys_no_client_and_a_traceback_shows_nothing_of_what_was_asked():
    program = """
import structlog
from baton.logs import configure_logging
configure_logging("info", "console")
def fails(prompt):
    raise ValueError("\x1b]0;mine\x07")
structlog.get_logger().info("request_finished", client_tag="\x1b]0;mine\x07", attempts=1)
try:
    fails("the " + "secret")
except ValueError:
    structlog.get_logger().exception("request_broke")
"""
    done = ran(program)
    assert done.returncode == 0
    for part in ("client_tag", r"\x1b]0;mine\x07", "ValueError"):
        assert part in done.stderr
    for part in ("the secret", "\x1b]", "\x07"):
        assert part not in done.stderr


@pytest.mark.parametrize("folder", ["there", "not there"])
def test_a_copy_has_more_than_stderr(tmp_path, folder):
    """`baton up` shows warnings and writes all lines to the copy, if its folder exists."""
    file: Path = tmp_path / folder / "supervisor.log"
    if folder == "there":
        file.parent.mkdir()
    shown = run("warning", str(file))
    assert [line["level"] for line in shown] == ["warning", "warning", "critical", "critical"]
    if folder == "there":
        kept = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        assert kept[1:] == shown
        assert kept[0]["event"] == "committed"


NO_LINE_FAILS = """
import io, logging, os, sys
import structlog
from baton.logs import configure_logging, log_to_stderr_by_default
if sys.argv[1] == "closed pipe":
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)
elif sys.argv[1] == "no stderr":  # as Python sets it in a process that was started with descriptor 2 closed
    sys.stderr = None
if sys.argv[2] == "default":
    log_to_stderr_by_default()
else:
    configure_logging("info", sys.argv[2])
for number in range(3000):  # more than every buffer between here and the file holds
    structlog.get_logger().warning("disk_full", number=number)
    logging.getLogger("some.library").warning("disk full %d", number)
print("went on")
"""


@pytest.mark.sample(4)
@pytest.mark.parametrize("form", ["json", "console", "default"])
@pytest.mark.parametrize("stderr", ["full disk", "closed pipe", "no stderr"])
def test_a_line_that_cannot_be_written_is_dropped(stderr, form):
    with Path("/dev/full").open("w") as full:  # each write to it fails with ENOSPC
        done = ran(NO_LINE_FAILS, stderr, form, stderr=full)
    assert done.stdout.endswith("went on\n")


FILLED = """
import os, resource, sys
import structlog
from baton.logs import configure_logging
os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))  # a write beyond it is cut, or fails with EFBIG
configure_logging("info", "json")
for number in range(100):
    structlog.get_logger().warning("line", number=number)
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
structlog.get_logger().warning("line", number=100)
"""


def test_dropped_lines_are_counted_and_the_number_is_logged_when_there_is_room(tmp_path):
    ran(FILLED, str(tmp_path / "log"))
    lines = (tmp_path / "log").read_text().splitlines()
    whole = [json.loads(line) for line in lines if line.endswith("}")]
    assert len(lines) - len(whole) <= 1, "at most the line that met the limit is torn"
    kept = [line["number"] for line in whole if line["event"] == "line"]
    assert kept == [*range(len(kept) - 1), 100]
    assert [line["count"] for line in whole if line["event"] == "log_lines_lost"] == [101 - len(kept)]
