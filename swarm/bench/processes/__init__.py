"""Processes of a load test: client processes (``child``, with the loops of ``share_sender`` and the HTTP exchanges of
``exchange``), the parent's side of them (``load_generators``), and a server that answers immediately (``null_server``).

Parent and child exchange JSON lines over the child's stdin and stdout (``pipe_messages``). A child ends when its stdin
is closed, so none outlives its parent. Ctrl-C reaches only the parent, which stops the children and collects their
records.
"""
