"""``swarm profile``: the speed of a swarm by phase, and where the time goes."""
