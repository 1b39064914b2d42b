"""``swarm doctor``: whether this machine is fit to run a swarm, or a part of one.

``facts`` collects facts without judging them. ``checks`` judges facts without collecting any; each finding has a text,
a level and a remedy. ``paths`` locates settings and state. ``estimate`` predicts how fast a model would be, and
``connectivity`` tests the connection to a broker. ``command`` shows everything. The problems of a running swarm are
shown by ``swarmctl doctor``, which asks its broker.
"""
