"""Inspection commands of ``swarmctl``.

* ``follow`` (``events``): polls the broker and prints what has changed (``admin.events`` compares);
* ``doctor``: checks the broker's reports once, with ``diagnostics``, ``workers`` and ``links``;
* ``version`` and ``versions``: the builds of all processes;
* ``settings``: the settings of a running process;
* ``gateways``: HTTP queries to a gateway.
"""
