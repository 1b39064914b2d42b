"""A model: its folder on disk (``checkpoint``), and a range of its layers as modules (``build``).

Only ``build`` and ``loading`` need torch. What a range needs is fetched and read alone (``loading``).
"""
