"""Each event is on disk immediately, in whole lines ordered by time, without the content of requests."""

import json
import resource
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.core import HandoffId, Token
from baton.engine.block_pool import BlockPool
from baton.errors import ConfigError
from baton.event_journal import OFF, History
from baton.testing import FakeClock
from tests.unit.history.good import TickingClock, taken
from tools.history_events import read

H = HandoffId("r", 2)


@pytest.fixture
def history(tmp_path):
    return History.open(str(tmp_path / "new" / "folder"), FakeClock(5.0), "decode", "decode-0", "7.3")


def lines(history_folder):
    [file] = history_folder.glob("**/*.jsonl")
    return file.name, [json.loads(line) for line in file.read_text().splitlines()]


def test_an_event_is_one_line_that_is_there_at_once(history, tmp_path):
    history.note("tokens", H, first=3, count=2)
    name, [started, event] = lines(tmp_path)
    assert (name, started["event"], started["role"]) == ("decode-0-7.3.jsonl", "started", "decode")
    source = {"monotonic": 5.0, "wall": 5.0, "process": "decode-0", "incarnation": "7.3"}
    assert event == source | {"event": "tokens", "request": "r", "attempt": 2, "first": 3, "count": 2}


def test_a_process_without_an_incarnation_is_named_by_its_id_and_its_owner_alone_may_read_it(tmp_path):
    with History.open(str(tmp_path), FakeClock(), "router", "router-1a2b"):
        pass
    name, events = lines(tmp_path)
    assert (name, [event["event"] for event in events]) == ("router-1a2b.jsonl", ["started", "stopped"])
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


def test_tokens_are_indices_and_none_are_no_event(history, tmp_path):
    history.tokens("adopted", H, [Token(4, 77, "secret"), Token(5, 78, "words")])
    history.tokens("tokens", H, [])
    _, [_, event] = lines(tmp_path)
    assert (event["event"], event["first"], event["count"]) == ("adopted", 4, 2)
    text = next(tmp_path.glob("**/*.jsonl")).read_text()
    assert not any(part in text for part in ("secret", "words", "77", "78"))


def test_blocks_are_pairs_and_nothing_is_no_event(history, tmp_path):
    pool = BlockPool(6)
    first = taken(pool, 2)
    first.publish(0, [b"a" * 32])
    both = taken(pool, 2, [first.blocks[0]])
    history.blocks("owned", H, both, shared=1)
    history.blocks("owned", H, both, len(both))
    history.blocks("published", H, both, 1, 2, part="fetch")
    _, [_, *events] = lines(tmp_path)
    assert [{key: e.get(key) for key in ("event", "own", "shared", "part")} for e in events] == [
        {"event": "owned", "own": [[2, 1], [3, 1]], "shared": [[0, 1]], "part": None},
        {"event": "published", "own": [[2, 1]], "shared": None, "part": "fetch"},
    ]


def test_it_says_how_the_process_ended_and_nothing_after_that(tmp_path):
    clock = FakeClock()
    with pytest.raises(ZeroDivisionError), History.open(str(tmp_path), clock, "router", "a") as history:
        raise ZeroDivisionError
    history.note("beat")
    history.close()
    _, events = lines(tmp_path)
    assert [(event["event"], event.get("error")) for event in events[1:]] == [("died", "ZeroDivisionError")]


def test_none_is_kept_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for history in (OFF, History.open(None, FakeClock(), "decode", "a", "1.1")):
        history.note("started")
        history.blocks("owned", H, taken(BlockPool(1), 1))
        history.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_a_mistake_of_the_config(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"history: cannot write .*file"):
        History.open(str(tmp_path / "file"), FakeClock(), "decode", "a", "1.1")


def test_threads_write_whole_lines_in_the_order_of_time(tmp_path):
    history = History.open(str(tmp_path), TickingClock(), "router", "a")

    def write(thread):
        for n in range(200):
            history.note("tokens", HandoffId(str(thread), 1), first=n, count=1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    _, events = lines(tmp_path)
    times = [event["monotonic"] for event in events]
    assert (len(times), times) == (801, sorted(times))
    for name in range(4):
        assert [event["first"] for event in events if event.get("request") == str(name)] == list(range(200))


def test_a_full_disk_ends_the_history_and_not_the_process(tmp_path):
    history = History.open(str(tmp_path), FakeClock(), "router", "a")
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (250, old[1]))
        for _ in range(3):
            history.note("beat")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, ignored)
    history.note("beat")
    history.close()
    [file] = tmp_path.iterdir()
    assert file.stat().st_size <= 250
    assert [event.name for event in read(file).events] == ["started", "beat"]
