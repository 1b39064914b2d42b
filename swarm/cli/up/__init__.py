"""``swarm up``: a whole swarm on this machine.

``supervisor`` decides which processes to start and when to give up, as events in and actions out; ``runner`` is the
shell around it. ``host`` communicates with the broker, ``summary`` formats its reports, ``statedir`` manages the
state directory, and ``models`` resolves and checks the model before workers start. ``forkserver`` forks the workers.
"""
