"""Attention: keys and values of every sequence, and who attends to what.

``arena`` keeps blocks of 32 positions (``grid``), ``passes`` is one run of a ragged batch, ``tiles`` says who attends
together, ``function`` is what transformers calls, ``own`` our kernel. A row's bits depend on its own sequence alone.
"""
