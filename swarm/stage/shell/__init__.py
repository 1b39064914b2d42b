"""The worker's process around the stage's core: threads, sockets, shutdown. Decides nothing.

In: orders of the broker, steps and connections of other workers, signals, results of loads. Out: the core's actions, in
their order. Rules: the core and the executor belong to the compute thread; other threads reach it through queues, and
share ``vitals``; heartbeats are sent however long a step takes::

    service      starts the threads and hands over orders
    control      the control connection to the broker
    heartbeat    the heartbeat thread
    compute      the compute thread: owns the step listener, the core and the executor
    kv_traffic   when copies of keys and values are sent and stored (``kv_channels``, ``kv_receiver``)
    connections  the step listener, and connections to other workers
    pieces       a step in pieces, if the device is short of memory
    loader       loads layers while the compute thread computes
    resources    the measured device and the shares of memory (``budget``)
    link_probe   latency and bandwidth of the connection to the broker
    openmp       how OpenMP's threads wait
    shutdown     an orderly end
    fast_exit    makes a crash visible within milliseconds
    vitals       values shared between the threads
"""
