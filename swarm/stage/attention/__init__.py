"""Attention: storage of every sequence's keys and values, and the attention of each row to them.

Input: queries, keys and values of a ragged batch, from the model's own layers. Output: each row's attention result.
Rules: a row's bits depend on its own sequence alone, however the batch was composed and the prompt was split; memory is
counted in blocks of 32 positions.

``arena`` stores the blocks (``grid``) in ``racks``, in the layout of the kernel that reads them (``layouts``);
``transfer`` reads and writes them in a form that all layouts share. ``passes`` describes one run of a batch, and
``tiles`` groups the rows that share a product in it. ``options`` has the parameters of attention. ``function`` is the
attention function that transformers calls; ``native_attention`` calls our own kernel with the arguments of
``kernel_args``.
"""
