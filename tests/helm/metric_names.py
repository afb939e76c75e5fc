"""The metrics that alerts and dashboards of the chart ask for, and what of it no process exports: names and labels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from baton.telemetry.labels import LABELS
from tests.helm.schemas import ROOT
from tools.metric_docs import exported

BOARDS = ROOT / "helm/baton/dashboards"
METRIC = re.compile(r"\b(?:baton|vllm)[_:][a-z0-9_:]+")
SELECTED = re.compile(r"\b((?:baton|vllm)[_:][a-z0-9_:]+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
GROUPED = re.compile(r"\bby \(([^)]*)\) *\(")
# Of targets, by the PodMonitors and `/targets`; and of buckets.
TARGETS = {"baton", "namespace", "component", "instance", "pod", "le"}


def unknown_metrics(documents: list[dict[str, Any]]) -> Iterator[str]:
    """Metrics, labels of theirs and values of these in rules and dashboards that no process exports."""
    known = {name: family.labels for family in exported().values() for name in family.samples}
    for expression in asked(documents):
        names = set(METRIC.findall(expression))
        yield from sorted(names - known.keys())
        for name, matchers in SELECTED.findall(expression):
            for label, _, value in MATCHER.findall(matchers):
                yield from _wrong(name, label, value, known.get(name, set()))
        labels = set().union(*(known.get(name, set()) for name in names))
        grouped = {label.strip() for group in GROUPED.findall(expression) for label in group.split(",")}
        yield from (f"{label}: no label in {expression}" for label in sorted(grouped - labels - TARGETS))


def _wrong(name: str, label: str, value: str, labels: set[str]) -> Iterator[str]:
    if label in TARGETS:
        return
    if label not in labels:
        yield f"{name} has no label {label}"
        return
    allowed = LABELS[label]
    if not isinstance(allowed, str):
        yield from (f"{name}: {label} is never {one}" for one in value.split("|") if one not in allowed)


def asked(documents: list[dict[str, Any]]) -> Iterator[str]:
    """All expressions of rules, and all queries of dashboards."""
    for document in documents:
        if document["kind"] == "PrometheusRule":
            yield from (rule["expr"] for group in document["spec"]["groups"] for rule in group["rules"])
    for board in sorted(BOARDS.glob("*.json")):
        yield from expressions(board)


def expressions(board: Path) -> list[str]:
    """The queries of a dashboard's panels and variables."""
    content = json.loads(board.read_text(encoding="utf-8"))
    targets = [target["expr"] for panel in content["panels"] for target in panel.get("targets", [])]
    return targets + [variable["query"] for variable in content["templating"]["list"]]
