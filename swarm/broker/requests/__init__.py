"""Requests: from a client's submission to the last token that it has acknowledged.

Comes in: what clients say, what the last stage drew, what the journal has written. Goes out: answers to clients, writes
for the journal. Rules: a token is in the journal before a client sees it; a sequence has one end, which is told once;
who reads slowly, or has left on purpose, holds up nobody.

``requests`` takes what clients say; ``intake`` says who is let in; ``tokens`` takes what was drawn to the journal, and
from there to the client, within its window; ``durability`` hears that ends are written, and makes requests again of
what the journal has; ``endings`` ends sequences; ``lookups`` answers questions, which change nothing; who comes late is
answered from ``state.archive``; ``allowance`` bounds what one member may take of the broker's time.
"""
