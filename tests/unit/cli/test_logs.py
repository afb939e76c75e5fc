"""`baton logs`: the lines of several files in order, the last ones of a large file, and new ones."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer

from baton.cli.inspect import log_lines
from baton.cli.inspect.log_lines import LogFile, LogFilter, find_logs, merged, pretty, print_logs
from baton.cli.inspect.logs import parse_age
from baton.cluster.state_dir import StateFolder
from baton.errors import InvalidRequest, NoWorker

BEGIN = 1_700_000_000.0


def event(at: float, what: str, **facts: object) -> str:
    """Return a log line in our format. `at`: seconds after BEGIN."""
    stamp = datetime.fromtimestamp(BEGIN + at, UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({"event": what, "level": "info", "timestamp": stamp} | facts)


def write(path: Path, *lines: str, mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode, encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    return path


def last(path: Path, wanted: LogFilter | None = None, most: int | None = None) -> list[str]:
    wanted = wanted or LogFilter()
    return [shown(line) for line in LogFile(path).last(wanted.takes, wanted.since, most)]


def shown(line: log_lines.Line) -> str:
    return line.text if line.event is None else str(line.event["event"])


@pytest.fixture
def printed(cluster, capsys):
    """A function that returns the events that `baton logs --json` prints."""

    def run(wanted: LogFilter, most: int | None = None) -> list[str]:
        print_logs("local", wanted, most, follow=False, as_json=True)
        return [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]

    return run


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """The log folder of an ended cluster `local`."""
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    folder = StateFolder("local").logs
    folder.mkdir(parents=True)
    return folder


def test_files_are_merged_by_time(cluster, capsys, printed):
    write(cluster / "router.log", event(0, "a"), event(2, "c"))
    write(cluster / "decode-0.log", event(1, "b"), event(3, "d"))
    print_logs("local", LogFilter(), None, follow=False, as_json=False)
    lines = [event(at, what) for at, what in enumerate("abcd")]
    assert capsys.readouterr().out.splitlines() == lines, "off a terminal a line is what it was"
    assert printed(LogFilter(), 3) == ["b", "c", "d"]


def test_of_a_large_file_only_the_end_is_read(tmp_path, monkeypatch):
    path = write(tmp_path / "router.log", *(event(n / 1000, f"e{n}", text="x" * 400) for n in range(10_000)))
    pread = Mock(wraps=os.pread)
    monkeypatch.setattr(os, "pread", pread)
    assert last(path, most=3) == ["e9997", "e9998", "e9999"]
    read = sum(size for (_, size, _), _ in pread.call_args_list)
    assert read <= 2 * log_lines.CHUNK_BYTES < path.stat().st_size / 8
    assert last(path, LogFilter(since=BEGIN + 9.9985)) == ["e9999"]


@pytest.mark.parametrize("chunk", [1, 7, 64, 10_000])
def test_lines_are_whole_wherever_a_chunk_ends(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(log_lines, "CHUNK_BYTES", chunk)
    lines = [event(n, f"e{n}", text="ä\u2028" * n) for n in range(12)]
    path = write(tmp_path / "a.log", *lines)
    file = LogFile(path)
    assert [line.text for line in file.last(LogFilter().takes, 0.0, None)] == lines
    write(path, event(13, "e13"), mode="a")
    assert [shown(line) for line in file.more()] == ["e13"]


def test_what_is_no_event_is_as_old_as_the_event_before_it(tmp_path):
    trace = ["Traceback (most recent call last):", '  File "x.py", line 1', "MemoryError"]
    path = write(tmp_path / "decode-0.log", "Fatal: too early", event(5, "a"), *trace, event(9, "b"), "last words")
    lines = LogFile(path).last(LogFilter().takes, 0.0, None)
    assert [shown(line) for line in lines] == ["Fatal: too early", "a", *trace, "b", "last words"]
    assert [line.at - BEGIN for line in lines] == [5, 5, 5, 5, 5, 9, 9]
    other = write(tmp_path / "router.log", event(7, "r"))
    both = merged([lines, LogFile(other).last(LogFilter().takes, 0.0, None)])
    assert [shown(line) for line in both][5:] == ["r", "b", "last words"]
    said = json.loads(lines[2].as_json())
    assert (said["process"], said["event"], said["text"]) == ("decode-0", "output", trace[0])
    assert datetime.fromisoformat(said["timestamp"]).timestamp() == BEGIN + 5
    path = write(tmp_path / "decode-1.log", "early", event(5, "hidden"))
    (early,) = LogFile(path).last(lambda line: "early" in line.text, 0.0, None)
    assert early.at == BEGIN + 5, "also of an event that is not shown"
    path = write(tmp_path / "redis.log", "no", "event")
    os.utime(path, (BEGIN, BEGIN))
    times = [line.at for line in LogFile(path).last(LogFilter().takes, 0.0, None)]
    assert times == [BEGIN, BEGIN], "where there is no event, that of the file"


REDIS = "4242:M 22 Nov 2026 10:49:30.123 # Warning: 32 bit"
RAY = "[2026-11-22 11:33:45,081 E 14856 14857] logging.cc:474: *** SIGABRT"


@pytest.mark.parametrize(
    ("text", "level", "says", "at"),
    [
        (REDIS, "warning", "Warning: 32 bit", datetime(2026, 11, 22, 10, 49, 30, 123_000)),
        (RAY, "error", "logging.cc:474: *** SIGABRT", datetime(2026, 11, 22, 11, 33, 45, 81_000)),
    ],
    ids=["redis", "ray"],
)
def test_others_have_levels_too(tmp_path, text, level, says, at):
    path = write(tmp_path / "redis.log", "4242:M 22 Nov 2026 10:49:29.000 * Ready", text)
    (found,) = LogFile(path).last(LogFilter(level=30).takes, 0.0, None)
    assert (found.level, shown(found), found.at) == (level, says, at.timestamp())


def test_follow_sees_new_lines_new_files_files_begun_anew_and_files_cut(cluster):
    files: dict[Path, LogFile] = {}

    def look() -> list[str]:
        log_lines._look(cluster, files)
        return [shown(line) for line in merged([list(file.more()) for file in files.values()])]

    router = write(cluster / "router.log", event(0, "a"))
    assert look() == ["a"]
    with router.open("a", encoding="utf-8") as file:
        file.write(event(1, "b")[:20])
    assert look() == [], "half a line waits"
    write(router, event(1, "b")[20:], mode="a")
    write(cluster / "decode-1.log", event(2, "new worker"))
    assert look() == ["b", "new worker"]
    write(router, event(3, "unread"), mode="a")
    StateFolder("local").bound_logs(most=10)
    write(router, event(4, "after the cut"), mode="a")
    write(cluster / "decode-1.log", event(5, "short"), mode="a")
    assert look() == ["unread", "after the cut", "short"]
    router.rename(cluster / "gone")
    assert look() == []
    write(router, event(6, "another cluster"))
    assert look() == ["another cluster"]


def test_a_file_that_was_cut_is_read_on_in_the_one_before(cluster):
    path = write(cluster / "router.log", event(0, "a"), event(1, "b"))
    StateFolder("local").bound_logs(most=10)
    write(path, event(2, "c"), mode="a")
    assert last(path) == ["a", "b", "c"]
    assert last(path, most=2) == ["b", "c"]
    StateFolder("local").bound_logs(most=10_000)
    assert path.read_text(encoding="utf-8"), "nothing is cut that is small"


def test_a_start_keeps_the_logs_of_one_run_before(cluster):
    for run in "abc":
        write(cluster / f"{run}.log", event(0, run))
        write(cluster / "router.log.1", event(0, run))
        StateFolder("local").start_logs()
        assert sorted(file.name for file in cluster.iterdir()) == ["previous"]
        assert sorted(file.name for file in (cluster / "previous").iterdir()) == [f"{run}.log", "router.log.1"]


def test_a_disk_without_room_for_the_copy_keeps_no_part_of_it(cluster, monkeypatch):
    def full(source, target):
        target.write_bytes(b"x")
        raise OSError(28, "No space left on device")

    path = write(cluster / "router.log", event(0, "a"))
    monkeypatch.setattr("shutil.copyfile", full)
    StateFolder("local").bound_logs(most=10)
    assert (path.read_bytes(), path.with_suffix(".log.1").exists()) == (b"", False)


def test_lines_of_a_request_with_its_choices_and_the_name_it_had_before(cluster, printed):
    write(
        cluster / "router.log",
        event(0, "accepted", request_id="r9", stream="mine", workers=["prefill-0", "decode-0"]),
        event(1, "accepted", request_id="other", stream="other"),
        event(4, "finished", request_id="mine"),
        event(5, "choice", request_id="mine.1"),
        event(6, "not it", request_id="mineral"),
        "not of a request",
    )
    write(cluster / "decode-0.log", event(3, "committed", request_id="r9", attempt=1), event(3, "x", request_id="z"))
    assert printed(LogFilter(request="mine")) == ["accepted", "committed", "finished", "choice"]


@pytest.mark.parametrize(
    "wanted", [LogFilter("mine", since=BEGIN + 2), LogFilter("mine", level=30), LogFilter("mine", "decode-0")]
)
def test_a_name_is_learned_from_a_line_that_is_not_shown(cluster, printed, wanted):
    write(cluster / "router.log", event(0, "accepted", request_id="r9", stream="mine"))
    write(cluster / "decode-0.log", event(3, "lost", request_id="r9", level="warning"))
    assert printed(wanted) == ["lost"]


def test_lines_of_a_worker_or_a_level(tmp_path):
    path = write(
        tmp_path / "router.log",
        event(0, "connected", worker="decode-0@1.2"),
        event(1, "accepted", workers=["prefill-0", "decode-0"]),
        event(2, "lost", worker="decode-01@1.2", level="warning"),
        event(3, "router's own"),
        "Segmentation fault",
    )
    assert last(path, LogFilter(worker="decode-0")) == ["connected", "accepted"]
    assert last(path, LogFilter(worker="router", level=30)) == ["lost", "Segmentation fault"]
    assert last(path, LogFilter(level=30)) == ["lost", "Segmentation fault"]


def test_an_age():
    for text, seconds in (("90", 90), ("90s", 90), ("5m", 300), ("1.5h", 5400), ("1d", 86400)):
        assert parse_age(text) == seconds
    for wrong in ("", "m", "-5m", "5 minutes", "1w", "nan"):
        with pytest.raises(typer.BadParameter, match="such as 5m"):
            parse_age(wrong)


def test_which_cluster(cluster, tmp_path, monkeypatch):
    assert find_logs(None) == cluster == find_logs("local"), "it has ended, its logs are there"
    StateFolder("other").logs.mkdir(parents=True)
    with pytest.raises(NoWorker, match=r"set --name to a cluster: .* has local, other"):
        find_logs(None)
    with pytest.raises(NoWorker, match=r"no logs of a cluster named 'lokal': .* has local, other"):
        find_logs("lokal")
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "none"))
    with pytest.raises(NoWorker, match="no cluster has run here"):
        find_logs(None)


def test_on_a_terminal():
    facts = {"request_id": "r1", "empty": "", "text": "two words", "workers": ["a"], "exception": "Traceback\n x"}
    text = pretty(log_lines.parse(event(0.25, "done", **facts), "router", 0.0)).plain
    assert text.endswith('done request_id=r1 text="two words" workers=["a"]\nTraceback\n x')
    hostile = event(0.25, "a\x1b[2J", client_tag="\x1b]0;x\x07", reason="\x9b31m b", exception="c\x1b\n d")
    for text in (hostile, "\x1b[2J of an interpreter"):
        shown = pretty(log_lines.parse(text, "router", 0.0)).plain
        assert not {"\x1b", "\x07", "\x9b"} & set(shown), "a client has no words with the terminal of an operator"
        assert "\\x1b[2J" in shown


@pytest.mark.parametrize(
    "text",
    [
        "1:M 99 Abc 2024 00:00:00.000 * hi",
        "[2024-99-01 00:00:00,000 I 1 1] hi",
        '{"timestamp": "0001-01-01T00:00:00"}',
        '{"timestamp": ' + "[" * 10_000,
    ],
    ids=["Redis", "Ray", "year", "depth"],
)
def test_a_line_without_a_readable_event_has_the_time_of_its_neighbour(text):
    assert log_lines.parse(text, "router", 7.0) == log_lines.Line(7.0, "router", text)


def test_an_unknown_request_is_an_error(cluster, capsys):
    (cluster / "router.log").write_text(event(1, "request_finished", request_id="r1") + "\n")
    log_lines.print_logs("local", LogFilter(request="r1", level=40), None, follow=False, as_json=True)
    assert capsys.readouterr().out == "", "it is known, and has no line of this level"
    with pytest.raises(InvalidRequest, match=r"--request: no line of the logs in .* is about 'r2'"):
        log_lines.print_logs("local", LogFilter(request="r2"), None, follow=False, as_json=True)
