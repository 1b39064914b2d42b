"""The planner: which device computes which layers, in which order.

Comes in: a ``Problem``, plain values. Goes out: a line of shares with what it costs, or a ``Shortage`` in words. Rules:
pure, and the same answer for the same problem; among plans that are equally quick, the one that moves least.

``solve`` is the door. ``search`` is the dynamic programme, over times that ``load`` makes of measurements and
``tables`` lays out; ``orders`` tries orders of many devices. ``recover`` shares out the layers of the dead, ``standby``
says who keeps which layers warm. ``explain`` puts a plan in words, ``lacking`` says why there is none, ``bound`` how
far from the best one can be. Knows no workers, epochs or requests.
"""
