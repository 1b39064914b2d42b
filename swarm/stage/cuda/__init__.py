"""Kernels for CUDA devices, written in Triton.

Rules: a row's bits do not depend on the other rows of the batch, because sums run in fixed blocks and a probe on the
device shows that all tiles in use agree. The kernels are imported only where a CUDA device is used, and in tests:
Triton comes with torch's CUDA builds and is no dependency of Swarm. Without a GPU, its interpreter runs the kernels in
the tests.

``matmul`` multiplies rows by a matrix, ``quantized`` packs matrices of 4- and 8-bit codes and decodes them in the
product, ``experts`` multiplies the rows of a mixture by the experts that they chose. Those of attention are
in ``attention.page_kernels``.
"""
