"""``swarmctl top``: live full-screen view of a swarm.

``view`` renders: data and a size go in, lines come out. ``keys`` decides what a key does. ``screen`` owns the terminal,
``poller`` the thread that polls the broker.
"""
