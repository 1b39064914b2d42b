"""Questions: what clients and ``swarmctl`` may ask beside requests.

``inquiries`` is the door; ``status`` and ``plan_report`` make JSON of what is known; ``what_if`` takes questions that
need a search, which ``solver`` answers in a process beside the broker. Asking changes nothing, but that a worker can be
asked to leave, and that ``helm`` has an operator's word on plans count.
"""
