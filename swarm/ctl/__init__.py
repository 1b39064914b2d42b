"""``swarmctl``: asks a running swarm how it is, and tells it what to do. Everything by way of the client library."""
