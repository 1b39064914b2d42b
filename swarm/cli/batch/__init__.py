"""``swarm batch``: runs a file of requests as a batch of a gateway. ``http`` talks to the gateway, ``run`` follows a
batch from its file to its results, ``command`` has the options."""
