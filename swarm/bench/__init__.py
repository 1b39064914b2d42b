"""The load generator: measures how much load an OpenAI-compatible server can serve. It works with any server and has no
knowledge of Swarm.

A run (``run``) measures a few *points*: one load each, held for a while. The parent process asks the server for its
model and for the length of our words in its tokens (``calibrate``), starts client processes (``processes``), gives each
its share of a point, and computes figures (``figures``) from the records that come back. A sweep (``sweep``) chooses
the next point from the last ones. Reports (``report``) are made from one document, which ``document`` builds.

The deciding parts are pure: when requests are sent (``schedule``), their lengths (``lengths``) and texts (``prompts``),
the decoding of a server's answer (``sse``, ``protocol``), and retries (``retry``).

Rules. A request's clock begins when it is due, not when a client finds time to send it. Only tokens that the server
generated count as tokens per second. Every request has a timeout, every point and the whole run a deadline. Times are
``time.monotonic()``, which all processes of a machine share.
"""
