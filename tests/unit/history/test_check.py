"""The checker of histories: a good one passes, and each mutation breaks the named rule."""

import json
import shutil
from collections import defaultdict
from itertools import pairwise

import pytest

from tests.unit.history.good import Cluster
from tools.check_history import main
from tools.history_check import check
from tools.history_order import STEPS

P, D, R = "prefill-0-7.1.jsonl", "decode-0-7.2.jsonl", "router-a.jsonl"
OLD_D, NEW_D = "decode-1-7.3.jsonl", "decode-1-7.4.jsonl"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    Cluster(folder).run()
    return folder


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "history")


def rows(folder, file):
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def write(folder, file, events):
    """Write the events with sorted times, because the clock is not under test."""
    times = sorted(event["monotonic"] for event in events)
    lines = [json.dumps(event | {"monotonic": time}) for event, time in zip(events, times, strict=True)]
    (folder / file).write_text("".join(line + "\n" for line in lines))


def where(events, name, request=None, attempt=None):
    """Return the index of the first such event."""
    wanted = {"event": name, "request": request, "attempt": attempt}
    given = {key: value for key, value in wanted.items() if value is not None}
    return next(n for n, event in enumerate(events) if given.items() <= event.items())


def rules(folder):
    return {violation.rule for violation in check([folder]).violations}


def test_a_good_history_passes(good, capsys):
    report = check([good])
    assert [str(violation) for violation in report.violations] == []
    assert report.outcomes == {"accepted": 8, "finished": 6, "cancelled": 2, "refused": 1}
    assert main([str(good), "--at-least", "8"]) == 0
    assert "0 violations" in capsys.readouterr().out
    assert main([str(good), "--at-least", "9"]) == 1
    assert "at least 9" in capsys.readouterr().out


def test_violations_are_printed_with_file_and_line(folder, capsys):
    events = rows(folder, D)
    place = where(events, "committed", "plain")
    write(folder, D, events[: place + 1] + events[place:])
    assert main([str(folder)]) == 1
    assert f"{folder / D}:{place + 2}: order: committed of plain/1" in capsys.readouterr().out


def test_a_history_that_is_not_there_fails(tmp_path):
    assert main([str(tmp_path)]) == 2
    assert main([str(tmp_path / "nowhere.jsonl")]) == 2


def insert(after, new, of="fenced", **facts):
    """Return a change that adds an event after the event `after` of a request's first attempt."""

    def change(events):
        place = where(events, after, of, 1)
        events.insert(place + 1, events[place] | {"event": new, "own": [], "shared": []} | facts)

    return change


def alter(name, request, **facts):
    def change(events):
        events[where(events, name, request)].update(facts)

    return change


def drop(name, request):
    def change(events):
        del events[where(events, name, request)]

    return change


THIEF = {"request": "thief", "own": [[0, 51]]}
CHANGES = {
    "sharing of an unpublished block": (P, drop("published", "plain"), "one_owner"),
    "a commit after the fence": (D, insert("fenced", "committed"), "order"),
    "a fence after the commit": (D, alter("adopted", "plain", event="fenced"), "order"),
    "tokens after the fence": (D, insert("released", "tokens", first=0, count=1), "one_ending"),
    "a token without a source": (R, alter("delivered", "cancelled", count=5), "witness"),
    "an ending with too few tokens": (R, alter("ended", "plain", count=3), "tokens"),
    "an attempt that does not rise": (R, alter("attempt", "plain", attempt=2), "attempts"),
    "a reservation of an old attempt": (D, alter("reserved", "fenced", attempt=3), "attempts"),
    "two owners of one block": (D, insert("reserved", "reserved", "plain", **THIEF), "one_owner"),
    "a block of another request": (D, alter("reserved", "shares", own=[[11, 9]], shared=[]), "let_go"),
    "an old generation": (P, alter("owned", "preempted", own=[[2, 1], [3, 1]]), "one_owner"),
    "sharing what is not published": (P, alter("owned", "preempted", own=[], shared=[[5, 1]]), "one_owner"),
    "a release of more than was held": (P, alter("let_go", "plain", own=[[1, 1]]), "let_go"),
    "an older incarnation as successor": (NEW_D, lambda rows: [r.update(incarnation="6.9") for r in rows], "place"),
    "another process in the file": (D, alter("committed", "plain", process="decode-9"), "place"),
    "an unknown event": (D, alter("beat", None, event="bet"), "readable"),
    "an incarnation that is none": (D, alter("beat", None, incarnation="new"), "readable"),
    "blocks that are none": (D, alter("reserved", "plain", own=[1, 2]), "readable"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_must_not_be_is_seen(folder, case):
    file, change, rule = CHANGES[case]
    events = rows(folder, file)
    change(events)
    write(folder, file, events)
    assert rule in rules(folder)


def test_a_commit_of_one_attempt_at_two_workers(folder):
    mine = rows(folder, D)
    begin, end = where(mine, "reserved", "plain"), where(mine, "adopted", "plain")
    others = rows(folder, NEW_D)
    there = {"process": "decode-1", "incarnation": "7.4"}
    blocks = {"own": [[0, 9]], "shared": []}
    copied = [event | there | (blocks if event["event"] == "reserved" else {}) for event in mine[begin:end]]
    write(folder, NEW_D, others[:2] + copied + others[2:])
    assert "one_commit" in rules(folder)


def test_time_that_goes_back(folder):
    events = rows(folder, D)
    events[3]["monotonic"] -= 50
    (folder / D).write_text("".join(json.dumps(event) + "\n" for event in events))
    assert rules(folder) == {"clock"}


def test_an_older_incarnation_takes_nothing_new(folder):
    """A replaced incarnation wakes up long after and reserves."""
    old, new = rows(folder, OLD_D), rows(folder, NEW_D)
    later = {"wall": new[1]["wall"] + 60, "monotonic": new[1]["monotonic"] + 60}
    late = old[where(old, "reserved")] | later | {"attempt": 9, "own": [[7, 99]]}
    write(folder, OLD_D, [*old, late])
    assert "place" in rules(folder)
    late["wall"] = new[1]["wall"] + 1  # it may not know yet
    write(folder, OLD_D, [*old, late])
    assert "place" not in rules(folder)


def test_a_killed_process_is_excused_from_what_it_could_not_do(folder):
    """The last line is torn, its blocks are never freed, and it has no successor."""
    events = rows(folder, D)[: where(rows(folder, D), "adopted", "plain") + 1]
    write(folder, D, events)
    with (folder / D).open("a") as file:
        file.write('{"monotonic": 12')
    assert not {"one_ending", "let_go", "readable"} & rules(folder)


def test_a_line_that_is_torn_in_the_middle_is_not_excused(folder):
    lines = (folder / D).read_text().splitlines()
    lines[4] = lines[4][:20]
    (folder / D).write_text("\n".join(lines) + "\n")
    assert "readable" in rules(folder)


def test_who_died_is_excused_and_who_lived_on_is_not(folder):
    """A process without a recorded end is judged by its remaining lifetime after the request's end."""
    events = rows(folder, D)
    del events[[event["event"] for event in events].index("beat") - 2]  # the last let_go
    write(folder, D, events)
    assert rules(folder) == {"let_go"}  # these blocks are never used again
    write(folder, D, [*events[:-1], events[-1] | {"event": "died"}])
    assert rules(folder) == set()
    write(folder, D, events[:-2])
    assert rules(folder) == set()  # it was killed soon after
    write(folder, D, events[:-1])
    assert rules(folder) == {"let_go"}  # its last beat came long after
    lost = events[-2] | {"event": "lease_lost"}
    write(folder, D, [*events[:-1], lost])
    assert rules(folder) == set()


def test_a_router_that_was_killed_is_excused_and_one_that_stopped_is_not(folder):
    events = [event for event in rows(folder, R) if event["event"] != "ended" or event["request"] != "plain"]
    write(folder, R, events)
    assert rules(folder) == {"one_ending"}
    write(folder, R, events[:-1])
    assert rules(folder) == set()


MAY_LACK = {"beat", "stopped", "published", "failed"}  # `published` is missed when the block is shared
LEGAL_WITHOUT = {("offered", "fenced"), ("offered", "fetched"), ("accepted", "fetched")}  # given the later events
MAY_SWAP = {"tokens", "failed"}  # a push may break before the first token arrives


def dropped(events):
    """Yield each event that must not be missing, and the events without it."""
    for place, event in enumerate(events):
        legal = (event["event"], event.get("request")) in LEGAL_WITHOUT and event["attempt"] == 1
        if event["event"] not in MAY_LACK and not legal:
            yield event, events[:place] + events[place + 1 :]


def doubled(events):
    """Yield each event that must not come twice, and the events with its repetition."""
    for place, event in enumerate(events):
        if event["event"] != "beat":
            yield event, events[: place + 1] + events[place:]


def swapped(events):
    """Yield each event of a request at its router, or of a handoff at a worker, and the events with its successor
    before it.
    """
    lives = defaultdict(list)
    for place, event in enumerate(events):
        if any(event["event"] in steps for steps in STEPS.values()):
            lives[event["request"], 0 if event["process"] == "router-a" else event["attempt"]].append(place)
    for one, other in (pair for places in lives.values() for pair in pairwise(places)):
        if {events[one]["event"], events[other]["event"]} != MAY_SWAP:
            changed = list(events)
            changed[one], changed[other] = events[other], events[one]
            yield events[one], changed


@pytest.mark.slow
@pytest.mark.parametrize("changes", [dropped, doubled, swapped])
def test_no_event_can_be_changed(folder, changes):
    """The four files are those of processes that lived to the end."""
    for file in (P, D, NEW_D, R):
        events = rows(folder, file)
        for event, changed in changes(events):
            write(folder, file, changed)
            assert rules(folder), (file, event)
        write(folder, file, events)


def test_on_one_host_a_step_of_the_wall_clock_is_no_fault(folder):
    events = rows(folder, OLD_D)
    write(folder, OLD_D, [event | {"wall": event["wall"] + 3600} for event in events])
    assert rules(folder) == {"place"}
    assert check([folder], one_host=True).violations == []
    assert (main([str(folder)]), main([str(folder), "--one-host"])) == (1, 0)
