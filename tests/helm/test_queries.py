"""The queries of dashboards, and that a mistake in one is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helm.metric_names import BOARDS, asked, problems, unknown_metrics

KNOWN = {
    "baton_kv_blocks": {"role", "state"},
    "baton_workers": {"role"},
    "baton_requests_total": {"outcome"},
    "baton_refusals_total": {"reason"},
    "baton_e2e_seconds_bucket": set[str](),
}
RIGHT = [
    'baton_kv_blocks{baton="$baton",role="decode",state=~"owned|reserved"}',
    'max by (role) (baton_kv_blocks{state!="free"}) / on (role) max by (role) (baton_workers)',
    'baton_kv_blocks{state=~"(own|reserv)ed"} * on (role) group_left () baton_workers',
    "histogram_quantile(0.5, sum by (le) (rate(baton_e2e_seconds_bucket[5m])))",
    'sum without (outcome) (rate(baton_requests_total{outcome="finished"}[5m]))',
]
WRONG = {
    "sum(rate(baton_requests_total[5m])": "no PromQL, unclosed left parenthesis",
    'baton_requests_total{outcome="finished}': "no PromQL, unterminated quoted string",
    'baton_requests_total{outcome=~"finished("}': "no PromQL, illegal regex",
    "rated(baton_requests_total[5m])": "no PromQL, unknown function",
    "rate(baton_requests_total)": "no PromQL, expected type matrix",
    "sum by outcome (baton_requests_total)": "no PromQL, ",
    "baton_request_total": "no metric baton_request_total",
    'baton_workers{state="free"}': "baton_workers has no label state",
    'baton_kv_blocks{state="ready"}': "baton_kv_blocks: state is never ready",
    'baton_kv_blocks{state=~"free|ready"}': "baton_kv_blocks: state is never ready",
    'rate(baton_requests_total{outcome!="committed"}[5m])': "baton_requests_total: outcome is never committed",
    'baton_refusals_total{reason="kv_dropped"}': "baton_refusals_total: reason is never kv_dropped",
    'baton_refusals_total{reason="Overloade."}': "baton_refusals_total: reason is never Overloade",
    'baton_refusals_total{reason="Overloaded|NoWorker"}': "baton_refusals_total: reason is never Overloaded",
    'baton_kv_blocks{state="free" or state="owned"}': "no PromQL, though its parser knows it",
    "sum by (reason) (baton_requests_total) / sum by (reason) (baton_refusals_total)": "reason: no label",
    "baton_requests_total / on (state) baton_refusals_total": "state: no label",
}


@pytest.mark.parametrize("query", RIGHT)
def test_a_right_query_has_no_problem(query: str):
    assert list(problems(query, KNOWN)) == []


@pytest.mark.parametrize(("query", "says"), WRONG.items())
def test_a_wrong_query_has_one(query: str, says: str):
    (problem,) = problems(query, KNOWN)
    assert problem.startswith(says)


def test_queries_of_dashboards_are_right():
    assert list(unknown_metrics([])) == []


def test_no_query_is_overlooked():
    text = "".join(board.read_text(encoding="utf-8") for board in BOARDS.glob("*.json"))
    assert len(list(asked([]))) == text.count('"expr"') + text.count('"query": "label_values(') > 60


@pytest.mark.parametrize("board", sorted(BOARDS.glob("*.json")), ids=lambda path: path.stem)
def test_exemplars_are_asked_for_where_there_are_any(board: Path):
    """Those are on buckets. Grafana asks once where several quantiles are of one metric."""
    panels = json.loads(board.read_text(encoding="utf-8"))["panels"]
    targets = [(panel["title"], target) for panel in panels for target in panel.get("targets", [])]
    assert targets
    wrong = [title for title, target in targets if target.get("exemplar", False) is not ("_bucket{" in target["expr"])]
    assert wrong == []
