"""The kernels for NVIDIA GPUs. Only the modules named `triton_*` import triton; nothing here is imported on a CPU."""
