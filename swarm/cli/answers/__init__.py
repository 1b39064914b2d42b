"""Commands that have a prompt answered: ``generate``, ``chat``, and ``attach`` for one that was asked for before.

``grammars`` are the options that say what an answer must look like; ``hops`` shows where each token's time went.
"""
