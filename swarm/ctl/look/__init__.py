"""Looking at a swarm: ``events`` again and again (what happened between two looks is decided by ``govern.events``;
``follow`` asks, waits and prints), ``doctor`` once (``ailments``, ``workers``, ``ways`` judge by the broker's reports),
``versions`` which processes are of which build (``version`` asks them), ``settings`` by which settings one runs;
``gateways`` asks one of those by HTTP."""
