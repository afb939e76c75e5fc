"""``openvino_export.py MODEL OUT DTYPE``: exports a checkpoint for openvino-genai.

bf16 weights are stored as fp16: half the memory of fp32 at the same speed, because it computes in bf16 either way.
int8 has one symmetric scale for each output, int4 one for each group of 32 inputs, as in Baton.
"""

from __future__ import annotations

import sys

from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig, OVWeightQuantizationConfig

CONFIGS = {
    "bf16": lambda: OVConfig(dtype="fp16"),
    "fp32": lambda: OVConfig(dtype="fp32"),
    "int8": lambda: OVConfig(quantization_config=OVWeightQuantizationConfig(bits=8, sym=True)),
    "int4": lambda: OVConfig(
        quantization_config=OVWeightQuantizationConfig(bits=4, sym=True, group_size=32, ratio=1.0, all_layers=True)
    ),
}


def main() -> None:
    """Export `MODEL` to `OUT`."""
    model, out, dtype = sys.argv[1:]
    main_export(model, out, task="text-generation-with-past", ov_config=CONFIGS[dtype]())


if __name__ == "__main__":
    main()
