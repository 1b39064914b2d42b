"""Fork server: a process that has imported what workers need, and creates each worker by forking itself.

Most of a worker's start-up time, and most of its memory, is torch and transformers: seconds and hundreds of MiB that
are the same in all workers of a machine. ``process`` is the fork server itself; ``client`` is the supervisor's end.

* A worker is forked twice, so that it is an orphan immediately, and the supervisor, which adopts orphans
  (``PR_SET_CHILD_SUBREAPER``), becomes its parent: it is ended, waited for and watched like any child, and outlives the
  fork server.
* A worker runs only after its process id has been sent to the supervisor. One that dies before the supervisor has read
  the id stays a zombie until then: unknown orphans are not reaped while a fork is pending. A fork server that dies
  before it has sent the id takes the worker with it.
* A process that forks must have no threads. A fork server that finds threads in itself reports that and ends.
* A fork server that has ended is restarted, a few times in a row (``client.RestartBudget``), unless it can't work.
* Without a fork server (on other systems than Linux, for GPUs, or after giving up), workers are started as separate
  processes: slower, but otherwise the same.
"""
