"""The names of metrics: those that a router exports, and those that alerts and dashboards of the chart ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import baton
from baton.telemetry import Metrics
from tests.helm.schemas import ROOT

BOARDS = ROOT / "helm/baton/dashboards"
METRIC = re.compile(r"\bbaton_[a-z0-9_]+")


def exported_metrics() -> set[str]:
    """The names of all samples that a router exports, and of the families they belong to."""
    metrics = Metrics("one", baton.__version__)
    metrics.watch_blocks(dict)
    metrics.watch_channels(list)
    metrics.watch_verifying(list)
    metrics.watch_queue(lambda: 0.0, lambda: 0.0)
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "info": ["_info"], "gauge": [""]}
    return {family.name + suffix for family in metrics.registry.collect() for suffix in suffixes[family.type]}


def unknown_metrics(documents: list[dict[str, Any]]) -> Iterator[str]:
    """Metrics in rules and dashboards that no router exports."""
    known = exported_metrics()
    for document in documents:
        if document["kind"] == "PrometheusRule":
            rules = [rule["expr"] for group in document["spec"]["groups"] for rule in group["rules"]]
            yield from sorted({name for expression in rules for name in METRIC.findall(expression)} - known)
    for board in BOARDS.glob("*.json"):
        yield from sorted(set(METRIC.findall("\n".join(expressions(board)))) - known)


def expressions(board: Path) -> list[str]:
    """The queries of a dashboard's panels and variables."""
    content = json.loads(board.read_text(encoding="utf-8"))
    targets = [target["expr"] for panel in content["panels"] for target in panel.get("targets", [])]
    return targets + [variable["query"] for variable in content["templating"]["list"]]
