"""The nursery: a process that has imported what workers need, and makes each of them by forking itself.

Most of what a worker takes to start, and most of its memory, is torch and transformers: seconds and hundreds of MiB
which are the same in all workers of a machine. ``process`` is the nursery itself; ``ours`` is the supervisor's end.

* A worker is forked twice, so that it is an orphan at once, and the supervisor's, who takes orphans in
  (``PR_SET_CHILD_SUBREAPER``): it is ended, waited for and watched as any child, and outlives the nursery.
* A worker runs only once its number is on its way to the supervisor. One that dies before the supervisor has read the
  number stays a zombie until then: nobody reaps unknown orphans while a birth is pending. A nursery that dies before
  it has sent the number takes the worker with it.
* A process that forks must have no threads. One that finds some in itself says so and ends.
* One that has ended is made anew, a few times in a row (``renewal``), unless it can't work.
* Without a nursery (elsewhere than on Linux, for GPUs, or when it is given up) workers are started as processes of
  their own, later but no worse.
"""
