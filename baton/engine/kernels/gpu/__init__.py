"""Kernels for NVIDIA GPUs. Only `ops` and `triton_*` import triton; kernel arguments are memory, strides, constants.

ops                              the kernels behind the `Kernels` protocol
triton_attention                 paged attention; decoding and prompt chunks share the inner loop `attend`
triton_rows                      fused kernels between the products
flash_attention, shapes          torch's FlashAttention, and decisions from shapes alone
cuda_graphs, cuda_memory         decode steps as CUDA graphs, and memory of the device
"""
