"""The time of one request in all processes, as spans, and the formats that they are exported in.

Read `trace` (spans and trace ids), then `chrome` (a file for Perfetto) and `otlp` (an OpenTelemetry collector).
"""
