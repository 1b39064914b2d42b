"""The executor that computes with torch: batches in, hidden states or tokens out.

Comes in: a ``Batch`` of rows, or a range of layers to be prepared (``stage/executor.py`` has the interface). Goes out:
``Forwarded``, and what a range takes. Rules: a row's bits depend on its own sequence alone, whatever is computed beside
it; a token depends on its sequence, its seed and its request alone; what is called exact has been proven on this
machine, and a kind of model that is cut wrongly is refused.

``torch_executor`` is the door. ``forward`` runs a batch through a stage; ``draws`` makes tokens by the rule in
``sampling``, with our kernel (``own_draws``) where it is built, and ``grammars`` says which are allowed. ``measure``
finds out how fast this device is (``device``; ``quota``: what a container leaves of it). ``selfcheck`` tries a cut
against the whole; ``exercise`` warms a stage up, holds its program against its modules and tests its device.
``rounding`` and ``kernels`` say whose bits come out, ``counters`` how much was computed.
"""
