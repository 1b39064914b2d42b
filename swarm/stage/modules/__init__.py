"""Modules of our own in the place of a model's, where what those compute is recognised.

Comes in: a module of the model, and what reads its weights. Goes out: one that computes the same in fewer or quicker
steps; or nothing, and the model's own code stays. Rules: ``recognition`` goes by a module's code, never by its name;
what a row comes to does not depend on the rows beside it.

``families`` puts modules around our own kernels in place: ``heads`` for attention, ``mlps``, ``experts``, ``norms``.
``merged`` does what can be done around torch's.
"""
