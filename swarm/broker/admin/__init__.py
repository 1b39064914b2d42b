"""Admin interface: everything that clients and ``swarmctl`` may ask or order apart from requests.

In: a question or an operator's order, and the account of the client. Out: a report as JSON, or an error as text. Rules:
queries change nothing, except that a worker can be asked to leave and an operator can constrain plans; a query delays
no step; an order that would leave the swarm without a plan is refused.

- ``queries`` dispatches queries; ``status``, ``plan_report`` and ``standby_report`` make JSON
- ``departed`` explains what happened to a worker that is gone
- ``plan_preview`` handles queries that need a search for a plan, which ``solver`` runs in a separate process
- ``operator`` executes an operator's orders about plans
"""
