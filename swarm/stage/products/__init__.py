"""Products of matrices: which kernel multiplies, and how it is known to be exact.

Comes in: a weight and a bias. Goes out: a module that multiplies rows by it, and says of itself whether it is exact: a
row's bits are the same with any rows beside it. Rules: exact is what a trial on this machine has shown, or what our own
kernels do by their order of sums; what can't be shown is called inexact, and still serves.

``linears`` chooses. ``fixed`` calls a library's kernel with the row counts that a ``probe`` has shown to be safe,
``proofs`` remembers what was shown. ``experts``, ``bare`` and ``steady`` do the same for mixtures of experts, for
matrices that a module multiplies by itself, and for activations. Quantized weights would enter here.
"""
