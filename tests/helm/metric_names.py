"""Queries of the chart's alerts and dashboards: they are valid PromQL, and some process exports their metrics."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql

from tests.helm.conftest import CHART
from tools.metric_docs import exported, values

BOARDS = CHART / "dashboards"
# Grafana's substitutions in a query before Prometheus receives it.
RANGE = re.compile(r"\$__\w+")
LABEL_VALUES = re.compile(r"label_values\((.+), *(\w+)\)")
# Labels of targets, by the PodMonitors and `/targets`, and of buckets.
TARGETS = {"baton", "namespace", "component", "instance", "pod", "le"}
PATTERNS = (promql.MatchOp.Re, promql.MatchOp.NotRe)
Known = dict[str, set[str]]  # labels, by the names that queries use


def unknown_metrics(documents: list[dict[str, Any]]) -> Iterator[str]:
    """Yield problems of rules and dashboards: invalid PromQL, and metrics, labels and values that are not exported."""
    known = {name: family.labels for family in exported().values() for name in family.samples}
    for expression in asked(documents):
        yield from (f"{problem} in {expression}" for problem in problems(expression, known))


def problems(expression: str, known: Known) -> Iterator[str]:
    """Yield the problems of one query. `known`: exported metrics."""
    try:
        tree = promql.parse(expression)
    except ValueError as error:
        yield f"no PromQL, {error}"
        return
    for node in nodes(tree):
        if isinstance(node, promql.VectorSelector):
            yield from _selected(node, known)
        elif isinstance(node, promql.AggregateExpr | promql.BinaryExpr):
            names = [below.name for below in nodes(node) if isinstance(below, promql.VectorSelector)]
            labels = TARGETS.union(*(known.get(name or "", set()) for name in names))
            yield from (f"{label}: no label" for label in _grouped(node) if label not in labels)


def nodes(tree: promql.Expr) -> list[promql.Expr]:
    found: list[promql.Expr] = []
    promql.walk(tree, found.append)
    return found


def _grouped(node: promql.AggregateExpr | promql.BinaryExpr) -> Iterable[str]:
    """Return the labels by which it groups or matches."""
    if node.modifier is None:
        return []
    if isinstance(node, promql.AggregateExpr):
        return node.modifier.labels
    matching = node.modifier.matching
    return [*(matching.labels if matching else ()), *(node.modifier.group_labels or ())]


def _selected(node: promql.VectorSelector, known: Known) -> Iterator[str]:
    if node.name not in known:
        yield f"no metric {node.name}"
        return
    if node.matchers.or_matchers:
        yield "no PromQL, though its parser knows it: or between matchers"
    for matcher in node.matchers.matchers:
        if matcher.name in TARGETS:
            continue
        if matcher.name not in known[node.name]:
            yield f"{node.name} has no label {matcher.name}"
        elif not isinstance(allowed := values(node.name, matcher.name), str):
            yield from (f"{node.name}: {matcher.name} is never {one}" for one in _never(matcher, allowed))


def _never(matcher: promql.Matcher, allowed: Iterable[str]) -> Iterator[str]:
    """Return a matcher's alternatives that match nothing. Alternatives within groups are not separated."""
    pattern = matcher.value if matcher.op in PATTERNS else re.escape(matcher.value)
    ones = pattern.split("|") if matcher.op in PATTERNS and "(" not in pattern else [pattern]
    return (one for one in ones if not any(re.fullmatch(one, value) for value in allowed))


def asked(documents: list[dict[str, Any]]) -> Iterator[str]:
    """Yield all expressions of rules and all queries of dashboards, as Prometheus receives them."""
    for document in documents:
        if document["kind"] == "PrometheusRule":
            yield from (rule["expr"] for group in document["spec"]["groups"] for rule in group["rules"])
    for board in sorted(BOARDS.glob("*.json")):
        yield from expressions(board)


def expressions(board: Path) -> Iterator[str]:
    """Yield the queries of a dashboard's panels and variables."""
    content = json.loads(board.read_text(encoding="utf-8"))
    for panel in content["panels"]:
        yield from (RANGE.sub("5m", target["expr"]) for target in panel.get("targets", []))
    for variable in content["templating"]["list"]:
        if variable["type"] == "query":
            yield LABEL_VALUES.sub(r"count by (\2) (\1)", variable["query"])
