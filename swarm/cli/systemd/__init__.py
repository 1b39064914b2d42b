"""``swarm systemd``: put the units in place, take them away, tell how they are.

``command`` has the words; ``manager`` asks systemd and tells it what to do; ``files`` writes and removes, and finds the
program that units start. What is in the files is ``swarm.service.install``'s to say.
"""
