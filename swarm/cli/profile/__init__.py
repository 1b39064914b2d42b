"""``swarm profile``: how fast a swarm is, and where the time goes."""
