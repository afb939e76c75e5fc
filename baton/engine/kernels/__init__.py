"""Kernels that compute a model: one set per kind of device, all with the results of the torch reference.

base                                 the protocols that model files are written against
torch_reference, torch_attention     plain torch, for any device and dtype
cpu/                                 C kernels for AVX2, AVX-512 and NEON
gpu/                                 Triton and FlashAttention for NVIDIA GPUs
select                               the choice of a set
"""
