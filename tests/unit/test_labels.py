"""The list of labels: it has exactly the exported ones, with the allowed values in each metric."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tools import metric_docs
from tools.metric_docs import LABELS, OF_METRIC, values

# A rejection's series starts with the first of its kind; all others exist from the start.
COME_LATER = {("baton_refusals", "reason")}


def exported() -> dict[tuple[str, str], set[str]]:
    """Return the values by metric and label, of a router and a worker that have just started."""
    found = defaultdict(set)
    registries = (metric_docs.router_registry(), metric_docs.worker_registry())
    metrics = [metric for registry in registries for metric in registry.collect()]
    for name, labels in ((metric.name, sample.labels) for metric in metrics for sample in metric.samples):
        for label, value in labels.items():
            found[name, label].add(value)
    return dict(found)


def test_labels_that_differ_between_metrics_are_those_that_these_have():
    found, wanted = exported(), {(metric, label) for metric, own in OF_METRIC.items() for label in own} - COME_LATER
    assert {key: found.get(key) for key in wanted} == {key: set(values(*key)) for key in wanted}


def test_a_label_is_the_same_in_all_metrics_or_listed_for_each():
    assert not LABELS.keys() & {label for own in OF_METRIC.values() for label in own}
    assert {label for metric, label in exported() if metric not in OF_METRIC} <= LABELS.keys()


@pytest.mark.parametrize(
    ("metric", "label", "value"),
    [
        ("baton_kv_blocks", "state", "ready"),
        ("baton_requests_total", "outcome", "committed"),
        ("baton_handoffs_total", "outcome", "finished"),
        ("baton_recoveries_total", "reason", "Overloaded"),
        ("baton_computed_tokens_total", "kind", "mixed"),
    ],
)
def test_a_value_of_another_metric_is_none_of_this_one(metric, label, value):
    assert any(value in own.get(label, ()) for own in OF_METRIC.values()), "it is one somewhere"
    assert value not in values(metric, label)


def test_samples_have_the_labels_of_their_metric_and_no_others():
    for suffix in ("", "_total", "_created", "_count", "_sum"):
        assert values(f"baton_handoffs{suffix}", "outcome") == OF_METRIC["baton_handoffs"]["outcome"]
        assert values(f"baton_handoffs{suffix}", "worker") == "a worker's id"
    with pytest.raises(KeyError):
        values("baton_kv_blocks", "outcome")
