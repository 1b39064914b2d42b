"""The whole swarm in one process, seeded: the production cores under virtual time and a virtual network.

Only executors and links are fake. ``run(seed)`` plays one schedule and checks the invariants at every event; the same
seed gives the same story, to the last message.
"""
