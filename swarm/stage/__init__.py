"""A stage: computes its range of layers for every step, stores keys and values, and logs the activations that it sends.

``core`` decides: ``handle(event, now) -> actions``. The modules of the core::

    membership     the worker's state towards its broker: introduced, welcomed, parked
    epochs         the plan in force, and the keys whose steps are accepted
    step_order     the order of steps, and the step that is being computed
    sequences      the positions stored of each sequence
    log            the activations sent, kept for replays
    faults         retries, reports and device tests after a failed step
    replay         rebuilding layers from a log
    recheck        computing a sample again for a comparison
    kv_exchange    copies of keys and values: sent (kv_sender), accepted (kv_arrivals), recorded (kv_copies)
    pending_plan   the next plan, loaded while the current one serves
    executor       the interface to the device

Packages::

    shell       the worker's process: threads, sockets, signals
    native      our own kernels in C, and the choice among their variants
    matmul      the choice of a kernel for each matrix, and the proof that it is exact
    attention   keys and values in blocks, and attention over them
    modules     our own modules, which replace modules of a model
    model       a model's folder, and a range of its layers built from it
    engine      the executor over torch: forward, sampling, measuring, self-check
"""
