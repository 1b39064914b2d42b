"""Attention: keys and values of every sequence, and who attends to what.

Comes in: queries, keys and values of a ragged batch, from the model's own layers. Goes out: what each row attends to.
Rules: a row's bits depend on its own sequence alone, however the batch was put together and the prompt was cut; room is
counted in blocks of 32 positions.

``arena`` keeps the blocks (``grid``), laid out (``layouts``) for whichever kernel reads them. ``passes`` is one run of
a batch, ``tiles`` says who attends together in it. ``function`` is what transformers calls; ``own`` is our kernel,
``calls`` what it is called with.
"""
