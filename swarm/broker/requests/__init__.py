"""Requests: from a client's submission to the last token that it has acknowledged.

``requests`` takes what clients say; ``intake`` says who is let in; ``tokens`` takes what the last stage drew to the
journal, and from there to the client, within its window; ``durability`` hears that ends are written, and makes requests
again of what the journal has; ``endings`` ends sequences; who comes late is answered from ``state.archive``;
``allowance`` bounds what one member may take of the broker's time. Rule: a token is in the journal before a client sees
it, and an end is told once.
"""
