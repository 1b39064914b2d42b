"""Batches: OpenAI's Files and Batches. A file's lines run as ordinary requests of the lowest priority.

In: uploads, orders to create and cancel batches, ends of lines, and the time. Out: lines to run, and writes to the
store.

Rules. A line's request has an id made from batch and line, and a fixed seed, so a gateway that starts again submits
the same request again, and the broker returns the answer that it has. An answer and the counts of its batch are written
in one transaction, and a line has at most one answer. Nothing is acknowledged to a client before it is on the disk.

``upload``, ``multipart`` and ``lines`` read uploads, ``objects`` has the records and their JSON, ``store`` keeps them
in the SQLite file that ``database`` opens, ``runner`` decides (pure), ``service`` owns tasks, timer and the store's
thread, and ``line_request`` runs one line through the gateway's own routes.
"""
