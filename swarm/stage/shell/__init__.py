"""The worker's process around the stage's core: its threads, its sockets, how it ends. Decides nothing.

Comes in: orders of the broker, steps and connections of other workers, signals, what a load came to. Goes out: what the
core asks for, in the order in which it asks. Rules: the core and the executor belong to the compute thread; other
threads tell it by queues, and each other by ``vitals``; beats come however long a step takes.

``service`` starts the threads and obeys the broker, to which ``control`` is the connection and ``beats`` the sign of
life. ``compute`` owns the door for steps (``way``), the core and the executor; ``pieces`` cuts a step that is too
large for the device's memory, ``points`` are the places for failpoints; ``loader`` loads beside it.
``equipment`` is what a worker begins with: its device measured (``probing``: the way to the broker), its memory shared
out (``budget``). ``waiting`` says how threads wait; ``leaving`` ends a worker in good order, ``keeper`` shows a death
at once.
"""
