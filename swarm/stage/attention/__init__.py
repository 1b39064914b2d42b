"""Attention: storage of every sequence's keys and values, and the attention of each row to them.

Input: queries, keys and values of a ragged batch, from the model's own layers. Output: each row's attention result.
Rules: a row's bits depend on its own sequence alone, however the batch was composed and the prompt was split; memory is
counted in blocks of 32 positions on a CPU, and in pages of 128 on other devices.

``arena`` decides and counts; ``memory`` is what it requires of the memory. On a CPU that is ``rack_memory``: slots of
``racks``, in the layout of the kernel that reads them (``layouts``). On other devices it is a pool of ``pages``.
``transfer`` reads and writes positions in a form that all layouts share. ``passes`` describes one run of a batch,
``tiles`` groups the rows that share a product in it, and ``page_plan`` has its block tables. ``options`` has the
parameters of attention. ``function`` is the attention function that transformers calls; ``native_attention`` calls our
own kernel with the arguments of ``kernel_args``, and ``paged`` attends to pages.
"""
