"""C kernels for CPUs with AVX2, AVX-512 or NEON, compiled on the machine that runs them.

ops, attention                the kernels behind the `Kernels` protocol, with their argument structures
calls, replay                 calls as data, and forwards made from them
quantized, sampling           the product of quantised weights, and the draw of tokens
compiler                      compilation into the state folder
kernel_choice, tuning         the choice of a product by measured profiles, and the measurement
kernels.c                     the C sources, which it includes
"""
