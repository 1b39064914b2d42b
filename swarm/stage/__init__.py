"""A stage: computes its layers for every step, keeps keys and values, and logs what it sends.

``core`` decides: ``handle(event, now) -> actions``. ``membership``: what this worker is to its broker. ``epochs``:
which plan is in force, and whose steps are taken. ``order``: which step is next. ``sequences``: what is held of each.
``log``: what was sent, for replays. ``faults``: what follows when a step can't be computed. ``replay``: layers brought
level. ``preparation``: the next plan, loaded beside the one in force. ``executor`` is what it needs from whoever
multiplies. Rooms::

    shell       the worker's process: threads, sockets, signals
    native      kernels of our own, in C, and the choice among them
    products    which kernel multiplies a matrix, and the proof that it is exact
    attention   keys and values in blocks, and who attends to what
    modules     modules of our own in the place of a model's
    model       a model's folder, and a range of its layers built from it
    engine      the executor over torch: forward, sampling, measuring, selfcheck
"""
