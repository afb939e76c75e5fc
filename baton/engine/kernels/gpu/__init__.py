"""Kernels for NVIDIA GPUs. Only `ops` and `triton_*` import triton; kernel arguments are memory, strides, constants.

ops                              the kernels behind the `Kernels` protocol
triton_attention                 paged attention; decoding and prompt chunks share the inner loop `attend`
triton_rows                      fused kernels between the products
flash_attention, shapes          torch's FlashAttention, and decisions from shapes alone
triton_sampling, triton_experts  draws of tokens, and grouped products of experts
cuda_graphs, warm_up             decode steps as CUDA graphs, and all kernels compiled before serving
cuda_memory, driver              memory of the device, and the version of the driver
"""
