"""``swarm systemd``: install, remove and show systemd units.

``command`` has the commands; ``manager`` queries and controls systemd; ``files`` writes and removes files, and finds
the program that units start. The contents of the files come from ``swarm.systemd.install``.
"""
