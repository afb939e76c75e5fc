"""Kernels in C for CPUs with AVX-512, compiled on the machine that runs them."""
