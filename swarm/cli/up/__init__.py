"""``swarm up``: a whole swarm on this machine.

``supervisor`` decides whom to start and when to give up, as events in and actions out; ``runner`` is the shell around
it. ``host`` talks with the broker, ``summary`` shows what it says, ``statedir`` is where all is kept,
``models`` what is asked of a model before workers see it.
"""
