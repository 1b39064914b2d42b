"""Questions: what clients and ``swarmctl`` may ask beside requests.

Comes in: a question or an operator's order, and on whose account it is asked. Goes out: a report as JSON, or in words
why not. Rules: asking changes nothing, but that a worker can be asked to leave, and that an operator's word on plans
counts; nobody's question holds up a step; nothing is done that would leave the swarm without a plan.

``inquiries`` is the door; ``status``, ``plan_report`` and ``settings_report`` make JSON of what is known, ``absent``
says what became of who is asked for and gone. ``what_if`` takes questions that need a search, which ``solver`` answers
in a process beside the broker. ``helm`` has an operator's word on plans count.
"""
