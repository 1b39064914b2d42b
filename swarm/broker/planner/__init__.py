"""The planner: which device computes which layers, in which order.

Comes in: a ``Problem``, plain values. Goes out: a line of shares with what it costs, or a ``Shortage`` in words. Pure,
and the same answer for the same problem. ``search`` is the dynamic programme, ``orders`` tries orders of many devices,
``recover`` shares out the layers of the dead, ``standby`` says who keeps which layers warm, ``explain`` puts a plan in
words. Knows no workers, epochs or requests.
"""
