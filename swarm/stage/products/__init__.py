"""Products of matrices: which kernel multiplies, and how it is known to be exact.

``linears`` chooses; ``fixed`` calls a library's kernel with the row counts that a ``probe`` has shown to be safe;
``proofs`` remembers what was shown. Quantized weights would enter here: a weight and a bias in, a module out.
"""
