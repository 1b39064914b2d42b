"""The load generator: how much does an OpenAI-compatible server bear? Knows nothing of the swarm; any server will do.

A run (``run``) has a few measured *points*: one load each, held for a while. The parent process asks the server what it
serves and how long our words are in its tokens (``calibrate``), starts client processes (``processes``), gives each its
share of a point, and makes figures (``figures``) of the records that come back; a sweep (``sweep``) chooses the next
point by the last ones. Reports (``report``) are made of one document, which ``document`` builds.

What decides is pure: when requests are sent (``schedule``), how long they are (``lengths``), what they say
(``prompts``), what bytes from a server mean (``sse``, ``protocol``), when to try again (``retry``).

Rules. A request's clock begins when it was due, not when we found time to send it. Only tokens that the server
generated count as tokens per second. Every request has a timeout, every point and the whole run a deadline. Times are
``time.monotonic()``, which all processes of a machine share.
"""
