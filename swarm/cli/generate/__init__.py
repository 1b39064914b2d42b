"""Commands that generate text: ``generate``, ``chat``, and ``attach`` for an earlier request.

``hops`` shows the time of each token, by stage.
"""
