"""Planner: which device computes which layers, in which order.

Input: a ``PlanningProblem``, plain values. Output: a line of shares with its cost, or a ``Shortage`` as text. Rules:
pure, and the same answer for the same problem; of several equally fast plans, the plan that loads the fewest bytes.

``solve`` is the entry point. ``search`` is the dynamic programme, over times that ``load`` derives from measurements
and ``tables`` lays out; ``ordering`` tries orders of many devices. ``takeover`` distributes the layers of lost stages
(``lost_positions``: what copies leave to replay), ``standby`` chooses which worker keeps which layers warm. ``explain``
describes a plan in text and figures, ``shortage`` explains why there is none, ``bound`` limits how much better the best
plan could be. Independent of workers, epochs and requests.
"""
