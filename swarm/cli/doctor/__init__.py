"""``swarm doctor``: is this machine fit to run a swarm, or a part of one?

``facts`` asks the machine and judges nothing; ``checks`` judges and asks nothing: each finding says what is so, how bad
it is, and what to do. ``outlook`` reckons how fast a model would be. ``command`` shows it all. What a running swarm
suffers from is asked of its broker: ``swarmctl doctor``.
"""
