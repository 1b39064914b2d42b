"""Our own replacements of a model's modules, for modules whose computation is recognised.

Input: a module of the model, and a function that reads its weights. Output: a module that computes the same in fewer or
faster steps; or none, and the model's own code stays. Rules: ``recognition`` compares a module's code, never its name;
a row's result does not depend on the other rows.

``families`` inserts modules around our own kernels: ``attention`` for attention, ``mlps``, ``experts``, ``norms``.
``fused`` does what is possible around torch's kernels.
"""
