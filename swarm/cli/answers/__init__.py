"""Commands that have a prompt answered: ``generate``, ``chat``, and ``attach`` for one that was asked for before.

``hops`` shows where each token's time went.
"""
