"""``openvino_export.py MODEL OUT DTYPE``: exports a checkpoint for openvino-genai, not quantized.

bf16 weights are stored as fp16: half the memory of fp32 at the same speed, because it computes in bf16 either way.
"""

from __future__ import annotations

import sys

from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig


def main() -> None:
    """Export `MODEL`, of dtype bf16 or fp32, to `OUT`."""
    model, out, dtype = sys.argv[1:]
    stored = {"bf16": "fp16", "fp32": "fp32"}[dtype]
    main_export(model, out, task="text-generation-with-past", ov_config=OVConfig(dtype=stored))


if __name__ == "__main__":
    main()
