"""What the documents tell people to type exists, with its options; where they point to is there."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import baton
from tests.guards.documents import Document, commands
from tests.guards.test_source import tracked
from tests.guards.told import listed, told, wrong_commands

ROOT = Path(__file__).resolve().parents[2]
GLOBS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/**/*.md", "models/README.md", "helm/**/README.md")
LINE_OF_SOURCE = re.compile(r"L\d+(-L\d+)?")


def documents() -> list[Document]:
    files = sorted({file for pattern in GLOBS for file in ROOT.glob(pattern)})
    return [Document(file.relative_to(ROOT).as_posix(), file.read_text()) for file in files]


def wrong_links(document: Document, names: set[str], anchors: dict[str, set[str]]) -> Iterator[str]:
    """Of its links, those to a file that git does not have, and to a heading that is not there."""
    for said in document.links():
        name, anchor = document.resolved(said.text)
        if name not in names:
            yield f"{said.where}: {said.text}: git has no {name}"
        elif anchor and anchor not in anchors.get(name, set()) and not LINE_OF_SOURCE.fullmatch(anchor):
            yield f"{said.where}: {said.text}: {name} has no such heading; allowed: {listed(anchors.get(name, ()))}"


def in_git() -> set[str]:
    """Every file that git has or would add, and every folder with one."""
    files = [file.relative_to(ROOT) for file in tracked()]
    return {path.as_posix() for file in files for path in (file, *file.parents)}


@pytest.fixture(scope="module")
def found() -> list[Document]:
    return documents()


def complain(problems: Iterable[str]) -> None:
    assert not (found := list(problems)), "\n" + "\n".join(found)


def test_what_they_tell_to_type_is_there(found):
    count = Counter(program for document in found for program, *_ in told(document))
    assert count["baton"] >= 100, count
    assert count["python"] >= 30, count
    complain(problem for document in found for problem in wrong_commands(document))


def test_targets_of_make_are_there(found):
    """Those that documents tell people to type; CI runs the same ones."""
    there = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [(said.where, words) for document in found for said in document.code() for words in commands(said.text)]
    made = [(where, word) for where, words in lines if words[:1] == ["make"] for word in words[1:]]
    wanted = [(where, word) for where, word in made if re.fullmatch("[a-z][a-z-]*", word)]
    assert {"setup", "demo", "check", "test"} <= {word for _, word in wanted} <= there, wanted
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "make check test"


def test_the_version_is_the_same_everywhere():
    assert baton.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_where_they_point_to_is_there(found):
    links = [link.text for document in found for link in document.links()]
    assert len(links) >= 50, links
    assert sum("#" in link for link in links) >= 10, links
    names, anchors = in_git(), {document.name: document.anchors() for document in found}
    complain(problem for document in found for problem in wrong_links(document, names, anchors))


def test_each_is_linked_from_another(found):
    """Or nobody finds it who reads from the README on."""
    to = {(document.name, document.resolved(link.text)[0]) for document in found for link in document.links()}
    linked = {name for document, name in to if document != name}
    pages = [document.name for document in found if document.name.startswith("docs/")]
    assert len(pages) >= 15, pages
    complain(f"{name}:1: no other document links to it" for name in pages if name not in linked)


# --- that the above sees what is wrong: of made-up text

COMMANDS = """
Use `baton up --detatch -c FILE`, or `baton
config sow FILE`. | `baton down [--name NAME \\| --nmae NAME]` |

```sh
BATON_TOKEN=x baton top --interval 1 | tee file   # fine, and so is: baton nothing
baton bench --rate 3 \\
    --concurency 4 && .venv/bin/baton logs -q > file
$ kubectl exec POD -- baton controller -k 3 & docker run baton baton generate "a b" c --n=2
baton up -c configs/none.yaml --set decode.bathc=3 --set decode.replicas=3
python tools/none.py; python benchmarks/engine.py --quick --quack; python benchmarks/simulator.py --cache A --of B
python -m simulator --wrokers 3; python -m simulator.none; python -m pytest tests/none::test -k x
```
```python
baton = "baton wrong"  # not for a shell
```
"""
WRONG = [
    "2: `baton up` has no --detatch; allowed: --config --detach ",
    "2: `baton config` takes no 'sow'; allowed: schema show validate",
    "3: `baton down` has no --nmae; allowed: --name",
    "7: `baton bench` has no --concurency; allowed: --arrivals ",
    "7: `baton logs` has no -q; allowed: --follow ",
    "9: `baton controller` has no -k; allowed: ",
    "9: `baton generate` takes no 'c'; allowed: nothing",
    "10: there is no configs/none.yaml; allowed: colocated.yaml ",
    "10: no cluster file has the key 'decode.bathc'; allowed: ",
    "11: there is no tools/none.py",
    "11: `benchmarks/engine.py` has no --quack; allowed: --cache ",
    "11: `benchmarks/simulator.py` has no --of; allowed: --cache ",
    "12: `simulator` has no --wrokers; allowed: --colocated ",
    "12: there is no simulator/none.py",
    "12: there is no tests/none",
]
LINKS = """
# A `b` & c_d: [e](#a-b--c_d-e)
## Twice
## Twice
[right](../README.md#a-b--c_d-e) [right](https://a.b/#c) `[no](link)` [right](../src/a.py#L3) [b][ref]
[wrong](#twice-2) and [right](#twice-1), [wrong](../README.md#thrice), ![wrong](y.png)

<img src="z.png">

[ref]: none.md
"""


def test_wrong_commands_are_seen_and_nothing_else():
    found = wrong_commands(Document("m.md", COMMANDS))
    said = [re.sub(r"^m.md:(\d+): .*: (?=(`.*` (has|takes)|there is|no cluster))", r"\1: ", line) for line in found]
    assert len(said) == len(WRONG)
    missing = [line for line in WRONG if not any(one.startswith(line) for one in said)]
    assert missing == [], said


def test_wrong_links_are_seen_and_nothing_else():
    document = Document("docs/made.md", LINKS)
    assert document.anchors() == {"a-b--c_d-e", "twice", "twice-1"}
    anchors = {"docs/made.md": document.anchors(), "README.md": {"a-b--c_d-e"}}
    problems = wrong_links(document, {"docs/made.md", "README.md", "src/a.py"}, anchors)
    assert [re.split(r": | has |; ", problem)[:3] for problem in problems] == [
        ["docs/made.md:6", "#twice-2", "docs/made.md"],
        ["docs/made.md:6", "../README.md#thrice", "README.md"],
        ["docs/made.md:6", "y.png", "git"],
        ["docs/made.md:10", "none.md", "git"],
        ["docs/made.md:8", "z.png", "git"],
    ]
