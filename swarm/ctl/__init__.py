"""``swarmctl``: command line to inspect and administer a running swarm, through the client library."""
