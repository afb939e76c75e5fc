"""The metrics of Baton's processes, and the listener that serves them. There is no global state.

Read `base` (labels and their values, collectors), then `router` and `worker` (the metrics of each kind of process).
`vllm_names` repeats some under vLLM's names; `http` is the listener, `MetricsServer`. Names and labels are an interface
for dashboards and autoscalers, listed in docs/reference/metrics.md. Label values are bounded: none comes from a client.
"""

from baton.metrics.http import MetricsServer
from baton.metrics.router import Metrics

__all__ = ["Metrics", "MetricsServer"]
