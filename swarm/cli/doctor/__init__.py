"""``swarm doctor``: is this machine fit to run a swarm, or a part of one?

``facts`` asks the machine and judges nothing; ``checks`` judges and asks nothing: each finding says what is so, how bad
it is, and what to do. ``places`` says where settings and state are. ``outlook`` reckons how fast a model would be, and
``reach`` tries the way to a broker. ``command`` shows it all. What a running swarm suffers from is asked of its broker:
``swarmctl doctor``.
"""
