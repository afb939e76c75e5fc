"""Metrics of promises: their outcomes, and how well the forecasts behind them are calibrated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import Metric

from baton.metrics import base


def promises(outcomes: Mapping[str, int], bins: Mapping[str, Mapping[int, int]]) -> Iterable[Metric]:
    """Yield the counters. `bins` has, by latency (ttft or itl), the outcomes in each tenth of the forecast."""
    rows = [((outcome,), float(count)) for outcome, count in outcomes.items()]
    yield base.counter("baton_promises", "Promises of latency by their outcome", ("outcome",), rows)
    tenths = [((name, str(tenth)), float(count)) for name, found in bins.items() for tenth, count in found.items()]
    text = "Latencies by the tenth of their forecast distribution; equal counts mean calibrated forecasts"
    yield base.counter("baton_promise_calibration", text, ("latency", "bin"), tenths)
