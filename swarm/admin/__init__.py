"""Operation of a swarm, shared by ``swarmctl`` and the gateway's console. Pure.

``report_rows`` reads tables of the broker's reports, ``events`` finds what happened between two snapshots, ``orders``
turns an operator's words into messages for the broker, and validates them.
"""
