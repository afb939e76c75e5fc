"""``openvino_export.py MODEL OUT``: a checkpoint and its tokenizer as openvino-genai reads them, not quantized."""

from __future__ import annotations

import sys

from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig


def main() -> None:
    """Export `MODEL` to `OUT`."""
    model, out = sys.argv[1:]
    main_export(model, out, task="text-generation-with-past", ov_config=OVConfig(dtype="fp32"))


if __name__ == "__main__":
    main()
