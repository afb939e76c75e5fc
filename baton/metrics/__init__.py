"""What Baton measures of itself: the metrics of one process, and the listener that serves them.

Nothing here is global. A process makes its metrics, hands them down, and serves them with `MetricsServer`. Names and
labels of the metrics are an interface (dashboards and autoscalers read them): docs/metrics.md has all. Labels stay
bounded: no value of one is a client's word (`baton.metrics.base`).
"""

from baton.metrics.http import MetricsServer
from baton.metrics.router import Metrics

__all__ = ["Metrics", "MetricsServer"]
