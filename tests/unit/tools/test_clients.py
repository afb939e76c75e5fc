"""The page of clients: its cells, and rows that are kept if only some clients run."""

import re
import sys
from pathlib import Path

import pytest

from tools import clients
from tools.clients import CLIENTS, PROGRAMS, Found, kept, page, row, short


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("NotFoundError: no such path", "NotFoundError: no such path"),
        ("ValueError: at http://127.0.0.1:8000/v1\nor | `x`", "ValueError: at the server/v1 or / 'x'"),
        ("OSError: /tmp/a/b/c.json is not there", "OSError: a file is not there"),
        ("BadRequestError: Error code: 400 - {'error': {'message': 'no', 'type': 't'}}", "BadRequestError: no"),
        ("x" * 500, "x" * 200),
    ],
)
def test_a_reason_fits_a_cell(reason, shown):
    assert short(reason) == shown


def test_rows_of_clients_that_were_not_run_are_kept():
    first = row("openai", Found("openai 1", (("chat", ""), ("tools", "404")), "2026-01-01"))
    assert first == "| openai | openai 1 | 2026-01-01 | chat | **tools**: 404 |"
    rows = kept(page({"litellm": row("litellm", Found("litellm 2", (), "2026-01-02")), "openai": first}))
    assert rows["openai"] == first
    assert [name for name in rows if name in CLIENTS] == ["openai", "litellm"], "the order of CLIENTS"
    assert page({**rows, "openai": first}) == page(rows)


def test_each_client_has_a_program_and_the_page_a_row():
    programs = {path.stem for path in PROGRAMS.glob("run_*.py")}
    assert programs == {f"run_{name.replace('-', '_')}" for name in CLIENTS}
    for path in PROGRAMS.glob("*.py"):
        compile(path.read_text(), path.name, "exec")
    assert set(CLIENTS) <= set(kept(clients.PAGE.read_text()))


PROGRAM = """
from check import check
check("good")(lambda: 1)
check("empty")(lambda: "")
check("bad")(lambda: 1 / 0)
raise SystemExit("gone")
"""


def test_a_failed_check_stops_no_other_and_a_broken_program_is_one(tmp_path, monkeypatch):
    (tmp_path / "run_openai.py").write_text(PROGRAM)
    (tmp_path / "check.py").write_text((PROGRAMS / "check.py").read_text())
    monkeypatch.setattr(clients, "PROGRAMS", tmp_path)
    found = clients.run("openai", Path(sys.executable), "http://127.0.0.1:1", tmp_path)
    assert dict(found.checks) == {
        "good": "", "empty": "got ''", "bad": "ZeroDivisionError: division by zero", "program": "gone",
    }  # fmt: skip
    assert re.fullmatch(r"openai [\d.]+", found.versions)
    with pytest.raises(SystemExit, match="2"):
        clients.main(["--only", "none"])
