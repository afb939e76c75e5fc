"""The queries of dashboards, and that a mistake in one is seen."""

from __future__ import annotations

import pytest

from tests.helm.metric_names import problems, unknown_metrics

KNOWN = {
    "baton_kv_blocks": {"role", "state"},
    "baton_workers": {"role"},
    "baton_requests_total": {"outcome"},
    "baton_refusals_total": {"reason"},
    "baton_e2e_seconds_bucket": set[str](),
}
WRONG = {
    "sum(rate(baton_requests_total[5m])": "no PromQL, unclosed left parenthesis",
    'baton_kv_blocks{state="free" or state="owned"}': "no PromQL, though its parser knows it",
    "baton_request_total": "no metric baton_request_total",
    'baton_workers{state="free"}': "baton_workers has no label state",
    'baton_kv_blocks{state=~"free|ready"}': "baton_kv_blocks: state is never ready",
    'baton_refusals_total{reason="Overloade."}': "baton_refusals_total: reason is never Overloade",
    "sum by (reason) (baton_requests_total) / sum by (reason) (baton_refusals_total)": "reason: no label",
    "baton_requests_total / on (state) baton_refusals_total": "state: no label",
}


@pytest.mark.parametrize(("query", "says"), WRONG.items())
def test_a_wrong_query_has_one(query: str, says: str):
    (problem,) = problems(query, KNOWN)
    assert problem.startswith(says)


def test_queries_of_dashboards_are_right():
    assert list(unknown_metrics([])) == []
