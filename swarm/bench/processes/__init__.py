"""Where requests are really sent: client processes (``child``, with the loops of ``load`` and the exchanges of
``exchange``), the parent's side of them (``crew``), and the server that answers at once (``null``).

Parent and child speak JSON lines over the child's stdin and stdout (``orders``). A child ends when its stdin does, so
none outlives its parent. Ctrl-C reaches only the parent, which tells the children to stop and collects what they have.
"""
