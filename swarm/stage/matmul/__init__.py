"""Matrix products: choice of the kernel that multiplies, and the proof that it is exact.

Input: a weight and a bias. Output: a module that multiplies rows by them and reports whether it is exact. Exact means
that a row's bits are the same whichever rows are in the batch with it. Rules: a kernel counts as exact if a trial on
this machine has shown it, or if it is one of our own kernels, whose order of summation is fixed. A kernel that cannot
be shown to be exact is called inexact and is still used.

``linears`` chooses the kernel. ``tiled`` calls a library's kernel with the row counts that a ``probe`` has shown to be
safe, and ``proofs`` caches what was shown. ``experts``, ``raw_matmul`` and ``elementwise`` do the same for mixtures of
experts, for matrices that a module multiplies itself, and for activations. Products with quantized weights are in
``native/quantized``, and ``modules/matrices`` chooses them.
"""
