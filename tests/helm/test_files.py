"""What the chart's files say about each other, and about Baton: versions, values, metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

import baton
from tests.helm.conftest import CHART, CI, Helm
from tests.helm.metric_names import unknown_metrics
from tests.helm.schemas import ROOT
from tools import helm_docs


def test_what_is_generated_is_fresh(capsys: pytest.CaptureFixture[str]):
    assert helm_docs.main(["--check"]) == 0, capsys.readouterr().out


def test_versions_are_those_of_baton():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == baton.__version__
    assert chart.get("dependencies") is None
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert f"ray=={values['ray']['version']}" in (ROOT / "constraints.txt").read_text().split()
    readme = (CHART / "README.md").read_text()
    assert all(
        f"{name}: {chart[key]}" in readme for name, key in (("Version", "version"), ("AppVersion", "appVersion"))
    )


def test_every_value_is_described():
    text = (CHART / "values.yaml").read_text()
    described = {row.path for row in helm_docs.rows(text)}
    missing = [
        path for path in leaves(yaml.safe_load(text)) if not any(path[:n] in described for n in range(1, len(path) + 1))
    ]
    assert not missing


def leaves(node: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all keys below which there are none."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, (*path, key))
    else:
        yield path


def test_the_schema_knows_every_value():
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
    missing = [
        path
        for path in leaves(yaml.safe_load((CHART / "values.yaml").read_text()))
        if not known_to(schema, schema, path)
    ]
    assert not missing


def known_to(schema: dict[str, Any], node: dict[str, Any], path: tuple[str, ...]) -> bool:
    """Whether the schema names this path, or allows any below."""
    if "$ref" in node:
        node = schema["definitions"][node["$ref"].rpartition("/")[2]]
    if not path:
        return True
    if path[0] in node.get("properties", {}):
        return known_to(schema, node["properties"][path[0]], path[1:])
    return node.get("additionalProperties", True) is not False


def test_the_schema_names_no_value_that_is_not():
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(schema["properties"]) - {"global"} == set(values)
    pools = set(schema["definitions"]["pool"]["properties"])
    assert pools == set(values["prefill"]) == set(values["decode"])


def test_objects_of_the_schema_are_closed():
    schema = json.loads((CHART / "values.schema.json").read_text())
    stack: list[Any] = [
        schema["properties"],
        {k: v for k, v in schema["definitions"].items() if not k.startswith("Cluster")},
    ]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            if "properties" in node and node.get("type") == "object":
                assert node.get("additionalProperties") is False or "required" in node, node
            stack.extend(node.values())


def test_rules_and_dashboards_know_their_metrics(helm: Helm):
    documents = helm.render(CHART / "ci/gpu-rdma-values.yaml")
    assert any(document["kind"] == "PrometheusRule" for document in documents)
    assert list(unknown_metrics(documents)) == []


def test_dashboards_are_whole():
    boards = [json.loads(path.read_text()) for path in sorted((CHART / "dashboards").glob("*.json"))]
    assert len({board["uid"] for board in boards}) == len(boards) == 2
    for board in boards:
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
        assert all('baton="$baton",namespace="$namespace"' in query for query in queries)


def test_each_way_says_what_it_is():
    assert all(path.read_text().startswith("# ") for path in CI)
