"""``swarmctl top``: a swarm, live, on a whole terminal. ``view`` draws: what is known and a size go in, lines come out.
``keys`` decides what a key does. ``screen`` owns the terminal, ``asking`` the thread that asks the broker."""
