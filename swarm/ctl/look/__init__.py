"""Looking at a swarm again and again: what happened between two looks is decided by ``govern.events``;
``follow`` asks, waits and prints. ``versions`` tells which processes are of which build."""
