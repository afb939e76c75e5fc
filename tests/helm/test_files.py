"""The chart's files are consistent with each other and with Baton: versions, values, metrics."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

import baton
from tests.helm.conftest import CHART, ROOT, Helm
from tests.helm.metric_names import unknown_metrics
from tools import helm_docs

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES_TEXT = (CHART / "values.yaml").read_text()
VALUES = yaml.safe_load(VALUES_TEXT)


def test_what_is_generated_is_fresh(capsys: pytest.CaptureFixture[str]):
    assert helm_docs.main(["--check"]) == 0, capsys.readouterr().out


def test_versions_are_those_of_baton():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == baton.__version__
    assert chart.get("dependencies") is None
    assert f"ray=={VALUES['ray']['version']}" in (ROOT / "constraints.txt").read_text().split()
    readme = (CHART / "README.md").read_text()
    assert f"Version: {chart['version']}" in readme
    assert f"AppVersion: {chart['appVersion']}" in readme


def test_every_value_is_described():
    described = {row.path for row in helm_docs.rows(VALUES_TEXT)}
    assert [path for path in leaves(VALUES) if not described & {path[:n] for n in range(1, len(path) + 1)}] == []


def leaves(node: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all leaf keys."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, (*path, key))
    else:
        yield path


def test_the_schema_has_the_values():
    """The objects of the schema are closed, so each value that it accepts has an entry. It names no other value."""
    assert SCHEMA["$schema"] == "http://json-schema.org/draft-07/schema#"
    assert [error.json_path for error in jsonschema.Draft7Validator(SCHEMA).iter_errors(VALUES)] == []
    assert set(SCHEMA["properties"]) - {"global"} == set(VALUES)
    pools = set(SCHEMA["definitions"]["pool"]["properties"])
    assert pools == set(VALUES["prefill"]) == set(VALUES["decode"])


def test_objects_of_the_schema_are_closed():
    named = {key: value for key, value in SCHEMA["definitions"].items() if not key.startswith("Cluster")}
    stack: list[Any] = [SCHEMA["properties"], named]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            if "properties" in node and node.get("type") == "object":
                assert node.get("additionalProperties") is False or "required" in node, node
            stack.extend(node.values())


def test_rules_know_their_metrics(helm: Helm):
    documents = helm.render(CHART / "ci/gpu-rdma-values.yaml")
    assert any(document["kind"] == "PrometheusRule" for document in documents)
    assert list(unknown_metrics(documents)) == []


def test_dashboards_are_whole_and_know_their_metrics():
    assert list(unknown_metrics([])) == []
    boards = [json.loads(path.read_text()) for path in sorted((CHART / "dashboards").glob("*.json"))]
    assert len({board["uid"] for board in boards}) == len(boards) == 2
    for board in boards:
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
        assert all('baton="$baton",namespace="$namespace"' in query for query in queries)
