"""Requests: from a client's submission to the last token that the client has acknowledged.

In: messages of clients, tokens drawn by the last stage, confirmations of the journal. Out: answers to clients, writes
for the journal. Rules: a token is in the journal before a client receives it; a sequence has exactly one end, which is
reported once; a client that reads slowly, or has left on purpose, delays no other.

- ``requests`` handles messages of clients
- ``admission`` decides which requests are accepted
- ``tokens`` passes drawn tokens to the journal, and from there to the client, within its window
- ``durability`` handles confirmations of the journal and restores requests from it
- ``completion`` ends sequences and requests
- ``lookups`` answers questions, which change nothing
- ``cpu_budget`` limits the time of the event loop that one member may use

Clients that ask for a request which is gone are answered from ``state.ended_requests``.
"""
