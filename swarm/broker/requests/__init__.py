"""Requests: from a client's submission to the last token that it has acknowledged.

``door`` takes what clients say; ``intake`` and ``admission`` say who is let in; ``tokens`` takes what the last stage
drew to the journal; ``durability`` hears that it is written; ``delivery`` sends it within the client's window;
``endings`` ends sequences, ``answers`` tells it; ``restored`` makes requests again of what the journal has; ``gone``
answers whoever comes late. Rule: a token is in the journal before a
client sees it, and an end is told once.
"""
