"""Members: workers join, send heartbeats, are judged, leave, and are called back.

In: workers' control messages, their heartbeats, and lost connections. Out: orders to workers and, for
``recovery``, each worker that is put out, with the evidence. Rules: at any time one process has a given worker name; no
worker is put out without evidence; no worker is blamed for a pause of the broker's own, or for a message damaged in
transit; a worker that was put out and lives may join again.

``admission`` takes a Hello and decides whether the worker is admitted, ``worker_names`` under which name;
``membership`` handles members' messages, and puts members out. ``health`` has the table of evidence and verdicts and
one pure ``judge``; ``monitor`` feeds it, and notices steps that got lost although no worker died. ``blame`` finds out
whether a worker or a request is to blame for a step that raised. ``integrity`` handles damaged messages and hidden
states that are not finite, ``recheck`` has samples computed again by another worker, ``keyring`` keeps the worker keys
that the heartbeat and step sockets accept. ``assets`` fetches the model's files, ``hosts`` asks hosts to start more
workers, ``accept_gate`` resumes accepting connections after file descriptors ran out.
"""
