"""The executor that computes with torch: batches in, hidden states or tokens out.

``torch_executor`` is its door. ``forward`` runs a batch through a stage, ``draws`` and ``sampling`` make tokens,
``grammars`` says which are allowed, ``measure`` finds out how fast this device is, ``selfcheck`` tries a cut against
the whole. What it calls exact has been proven on this machine.
"""
