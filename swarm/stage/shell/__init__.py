"""The worker's process around the stage's core: its threads, its sockets, how it ends. Decides nothing.

``service`` obeys the broker, to which ``control`` is the connection; ``compute`` owns the data doors and the executor.
They tell each other by queues and by ``vitals``; ``probing`` measures the way to the broker, ``budget`` shares out
memory, ``keeper`` shows a death at once.
"""
