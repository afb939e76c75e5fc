"""Commands, options and link targets in the documents exist, and texts keep the language rules.

A regular expression can check only a part of these rules. Tutorials and how-to pages name what exists, and their
programs are valid; tests/e2e/test_tutorials.py runs them.
"""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
import yaml

import baton
from baton import errors
from baton.config.loading import known_keys, load_config
from tests.guards.documents import ROOT, Document, commands, listed, told, wrong_commands
from tests.guards.test_source import tracked
from tools.language import COMMENTED, Text, all_findings, findings
from tools.log_events import events

GLOBS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/**/*.md", "models/README.md", "helm/**/README.md")
LINE_OF_SOURCE = re.compile(r"L\d+(-L\d+)?")
PRODUCT = ("baton", "router", "prefill_workers", "decode_workers", "kvtransfer", "tools")
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/README.md", "docs/glossary.md", "docs/performance.md")
FOLDERS = ("docs/design", "docs/how-to", "docs/reference", "docs/reports", "docs/tutorials", "helm/baton/README.md")
OTHERS = ("tests", "benchmarks", "examples")
BROKEN = {
    "What it sends.": "begins with",
    "It waits. Who is late is not asked.": "begins with",
    "Nobody reads it.": "not 'who'",
    "The worker tells its router.": "only people",
    "It is kept for ever.": "archaic",
    "All are read at once.": "at once",
    "Its limit; 0: none.": "ellipsis",
    "A list of what is free.": "free relative",
}


def wrong_links(document: Document, names: set[str], anchors: dict[str, set[str]]) -> Iterator[str]:
    """Yield links to a file that git does not have, or to a missing heading."""
    for said in document.links():
        name, anchor = document.resolved(said.text)
        if name not in names:
            yield f"{said.where}: {said.text}: git has no {name}"
        elif anchor and anchor not in anchors.get(name, set()) and not LINE_OF_SOURCE.fullmatch(anchor):
            yield f"{said.where}: {said.text}: {name} has no such heading; allowed: {listed(anchors.get(name, ()))}"


def in_git() -> set[str]:
    """Return every file that git has or would add, and every folder with one."""
    files = [file.relative_to(ROOT) for file in tracked()]
    return {path.as_posix() for file in files for path in (file, *file.parents)}


def document(name: str) -> Document:
    return Document(name, (ROOT / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def found() -> list[Document]:
    """All documents."""
    files = sorted({file for pattern in GLOBS for file in ROOT.glob(pattern)})
    return [document(file.relative_to(ROOT).as_posix()) for file in files]


def complain(problems: Iterable[str]) -> None:
    assert not (found := list(problems)), "\n" + "\n".join(found)


def test_what_they_tell_to_type_is_there(found):
    count = Counter(program for document in found for program, *_ in told(document))
    assert count["baton"] >= 100, count
    assert count["python"] >= 30, count
    complain(problem for document in found for problem in wrong_commands(document))


def test_targets_of_make_are_there(found):
    """Make targets in the documents exist; CI runs the same ones."""
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
    """Otherwise no reader of the README would find the page."""
    to = {(document.name, document.resolved(link.text)[0]) for document in found for link in document.links()}
    linked = {name for document, name in to if document != name}
    pages = [document.name for document in found if document.name.startswith("docs/")]
    assert len(pages) >= 15, pages
    complain(f"{name}:1: no other document links to it" for name in pages if name not in linked)


WRONG = {  # a command, and its problem
    "baton up --detatch -c FILE": "`baton up` has no --detatch",
    "baton config sow FILE": "`baton config` takes no 'sow'",
    "BATON_TOKEN=x baton logs -q > file": "`baton logs` has no -q",
    "kubectl exec POD -- baton controller -k 3": "`baton controller` has no -k",
    "baton up -c configs/none.yaml": "there is no configs/none.yaml",
    "baton up --set decode.bathc=3": "no cluster file has the key 'decode.bathc'",
    "python tools/none.py": "there is no tools/none.py",
    "python benchmarks/engine.py --quick --quack": "`benchmarks/engine.py` has no --quack",
    "python -m baton.planner.sim --wrokers 3": "`baton.planner.sim` has no --wrokers",
    "python -m pytest tests/none::test -k x": "there is no tests/none",
}
RIGHT = "baton top --interval 1 | tee file  # baton nothing\nbaton status [--name NAME \\| --json]\n"


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_command_is_seen(command):
    (problem,) = wrong_commands(Document("m.md", f"```sh\n{RIGHT}{command}\n```\n"))
    assert problem.startswith(f"m.md:4: {command}: {WRONG[command]}")


def test_wrong_links_are_seen_and_nothing_else():
    links = "[](../README.md#a) `[](no)` [](#c-1) [](#c-2) [](../README.md#d) ![](y.png)\n[z]: z.md"
    document = Document("docs/made.md", f"# A `b`: [e](#a-b-e)\n## C\n## C\n{links}\n")
    assert document.anchors() == {"a-b-e", "c", "c-1"}
    anchors = {document.name: document.anchors(), "README.md": {"a"}}
    problems = wrong_links(document, {document.name, "README.md"}, anchors)
    assert [problem.split(": ")[:2] for problem in problems] == [
        ["docs/made.md:4", "#c-2"],
        ["docs/made.md:4", "../README.md#d"],
        ["docs/made.md:4", "y.png"],
        ["docs/made.md:5", "z.md"],
    ]


@pytest.mark.parametrize(
    "places", [PRODUCT, (*PAGES, *FOLDERS), (*OTHERS, *COMMENTED)], ids=["product", "pages", "others"]
)
def test_no_sentence_breaks_the_rules(places):
    complain(all_findings(places, strings=False))


@pytest.mark.parametrize("sentence", BROKEN)
def test_each_rule_finds_its_pattern(sentence):
    (found, *_) = findings(Text("x.py", 1, sentence))
    assert BROKEN[sentence] in found


def test_code_and_plain_sentences_are_left_alone():
    text = "Return the blocks of `who` that it sends.\n\n>>> nobody\n\nIt waits until the worker reports."
    assert not list(findings(Text("x.py", 1, text)))


# --- tutorials and how-to pages


TUTORIALS = ("first-cluster", "own-model", "openai-clients", "watch-a-request", "kill-a-worker")
PROGRAMS = [*(f"docs/tutorials/{name}.md" for name in TUTORIALS), "docs/how-to/from-vllm.md"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_and_cluster_files_are_valid(name, tmp_path):
    for language, text in document(name).fences():
        if language == "python":
            ast.parse(text, name)
        elif language == "yaml":
            file = tmp_path / "cluster.yaml"
            tree = yaml.safe_load(text)
            file.write_text(yaml.safe_dump(tree | {"model": tree["model"] | {"path": "oracle"}}), encoding="utf-8")
            assert load_config(file, [], {}).name == tree["name"]


def test_each_tutorial_is_known_and_cleans_up():
    """A tutorial that is not in the list would not run, and one without `baton down` leaves a cluster behind."""
    assert sorted(TUTORIALS) == sorted(path.stem for path in (ROOT / "docs/tutorials").glob("*.md"))
    for name in TUTORIALS:
        fences = document(f"docs/tutorials/{name}.md").fences()
        lines = [line for language, text in fences if not language for line in text.splitlines()]
        starts, ends = (sum(line.startswith(start) for line in lines) for start in ("baton up", "baton down"))
        assert starts == ends > 0, name


def named(page: str, pattern: str) -> set[str]:
    """Return the names of this form that a page has in backticks."""
    return {found for said in document(page).code() for found in re.findall(pattern, said.text)}


def test_troubleshooting_names_errors_events_and_keys_that_exist():
    page = "docs/how-to/troubleshoot.md"
    text = document(page).text
    events_named = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"events? (?:`\w+`(?:, )?)+", text))))
    assert len(events_named) >= 10
    assert events_named <= set(events())
    classes = named(page, r"^([A-Z][a-z]+[A-Z]\w+|Overloaded|Unauthenticated)(?=$|:)")
    assert len(classes) >= 10
    assert all(issubclass(getattr(errors, name), errors.BatonError) for name in classes)
    keys = named(page, r"^((?:router|prefill|decode|transfer|ledger|security|model|redis|ray)\.[a-z_.]+)$")
    assert len(keys) >= 10
    assert keys <= set(known_keys())


def test_metric_names_exist():
    metrics = document("docs/reference/metrics.md").text
    for page in ("docs/how-to/troubleshoot.md", "docs/how-to/from-vllm.md"):
        assert not [name for name in named(page, r"^baton_\w+$") if f"`{name}`" not in metrics]
    table = document("docs/how-to/from-vllm.md").text.split("\n## Metrics\n")[1].split("\n## ")[0]
    same = [row for row in table.splitlines() if "| same name" in row]
    names = [name for row in same for name in re.findall(r"`(vllm:\w+)`", row)]
    assert len(names) >= 15
    assert not [name for name in names if f"`{name}`" not in metrics]


def test_options_of_vllm_lead_to_keys_that_exist():
    text = document("docs/how-to/from-vllm.md").text
    sections = "|".join(sorted({key.partition(".")[0] for key in known_keys() if "." in key}))
    keys = set(re.findall(rf"`((?:{sections})\.[a-z_.]+)(?:`|:)", text))
    assert len(keys) >= 20
    assert keys <= set(known_keys())
