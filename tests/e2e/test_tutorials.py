"""The tutorials' commands and programs run, in order, against one cluster.

Commands that start and stop clusters, install or train are left out, and so are those with a placeholder.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from jinja2 import Environment

from tests.guards.documents import Document
from tests.support.cluster_process import ROOT
from tests.support.time_factor import scaled
from tests.support.waiting import eventually
from tools.clients import TEMPLATE

pytestmark = pytest.mark.slow
PAGES = sorted({path.stem for path in (ROOT / "docs/tutorials").glob("*.md")} - {"own-model"})  # tested below
LEFT_OUT = re.compile(
    r"^(make|source|mkdir|cp|cat >|kill|python [\w/]|baton (up|down|demo|doctor|bench)\b)|\b[A-Z]+_ID\b", re.M
)


def steps(page: str) -> Iterator[tuple[str, str, str]]:
    """Yield language, text and shown output of each fence of a tutorial that must run."""
    text = (ROOT / "docs/tutorials" / f"{page}.md").read_text(encoding="utf-8")
    fences = [
        (language, code) for language, code in Document(page, text).fences() if language or not LEFT_OUT.search(code)
    ]
    for (language, code), (next_language, shown) in pairwise([*fences, ("", "")]):
        if language in {"", "python"}:
            yield language, code, shown if next_language == "text" else ""


def run(cluster, language: str, code: str) -> str:
    """Run a program or commands of a page against `cluster`. Return the output; fail if there is none."""
    state = cluster.state()
    addresses = {"50051": state.grpc, "50052": state.admin, "8000": state.http, "9100": state.metrics}
    for written, address in addresses.items():
        code = code.replace(f"127.0.0.1:{written}", address)
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-euo", "pipefail", "-c", code]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "BATON_HOME": str(cluster.home.path), "PATH": path, "NO_COLOR": "1"}

    def once() -> subprocess.CompletedProcess[str]:
        within = scaled(120)
        return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=within, check=False)

    done = once()
    if code.startswith("baton status"):  # a killed worker of the page is replaced some time
        done = eventually(lambda: found if (found := once()).returncode == 0 else None, within_s=60)
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.strip(), code
    return done.stdout


def words(text: str) -> list[str]:
    """Return the lines of an output, with `*` for words that differ between runs: numbers and ids."""
    return [re.sub(r"\S*\d\S*", "*", line).strip() for line in text.strip().splitlines()]


@pytest.mark.sample(2)
@pytest.mark.xdist_group("demo")
@pytest.mark.parametrize("page", PAGES)
def test_a_tutorial_runs(demo_cluster, page):
    eventually(lambda: len(demo_cluster.connected()) == 3, within_s=60)
    found = list(steps(page))
    assert len(found) >= 4
    for language, code, shown in found:
        printed = run(demo_cluster, language, code)
        if language == "python":
            assert words(printed) == words(shown), code
    eventually(lambda: len(demo_cluster.connected()) == 3, within_s=60)  # whole again for the next test


def test_the_template_of_the_page_makes_the_prompts_of_the_cluster():
    """That of the cluster has a place for calls too, which the examples need."""
    page = (ROOT / "docs/tutorials/openai-clients.md").read_text(encoding="utf-8")
    (template,) = re.findall(r"^\{% if tools.*$", page, re.M)
    turns = [
        {"role": role, "content": text} for role, text in (("user", "The capital"), ("assistant", ""), ("user", "of"))
    ]
    for tools in (None, [{"type": "function", "function": {"name": "weather"}}]):
        prompts = {Environment().from_string(one).render(messages=turns, tools=tools) for one in (template, TEMPLATE)}
        assert len(prompts) == 1, prompts


def test_the_cluster_file_of_your_own_model_runs(home):
    """The page's cluster file runs with free ports, and with the demo model instead of the trained one."""
    page = (ROOT / "docs/tutorials/own-model.md").read_text(encoding="utf-8")
    (text,) = [code for language, code in Document("own-model", page).fences() if language == "yaml"]
    shutil.copytree(ROOT / "models/demo", home.path / "models/toy")
    file = home.path / "toy.yaml"
    file.write_text(text.replace("/tmp/toy", str(home.path / "models/toy")), encoding="utf-8")
    with home.cluster(file) as running:
        ran = [run(running, language, code) for language, code, _ in steps("own-model") if not language]
    assert len(ran) >= 3
