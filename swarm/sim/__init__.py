"""The whole swarm in one process, seeded: the production cores under virtual time and a virtual network.

Only executors and links are fake. ``run(seed)`` plays one schedule and checks the invariants at every event. The same
seed gives the same story, to the last message::

    world       virtual time, random numbers, the story
    network     connections and their faults, and listeners that check keys
    journal     a simulated disk, and the journal's threads
    views       what the processes and the checks see of each other
    run         plays a schedule
    actors      the production cores with simulated shells
    checks      the invariants
    schedules   what is played: settings, requests, faults
"""
