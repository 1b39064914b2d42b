"""Drafts: the plan that would be made now, from what members have said of themselves.

Comes in: the state, the rules that were set by hand, and what is supposed to be otherwise. Goes out: a ``Proposal``
(who would hold which layers, with a forecast), or a ``Shortage`` in words; of a proposal, the plan to be carried out.
Rules: an operator's word comes before the settings; nobody gets layers that it has refused just now; a plan that can go
on stays, unless the change is worth it. Changes nothing: ``recovery`` does.

``proposals`` is the door: the best plan, the one in force if it may stay, the way back after a death, and ``draft``,
which refuses what is no pipeline. ``candidates`` turns members into the planner's devices (``figures``: what they
measured) and asks it. ``rules`` were set by hand; ``demand`` judges by the load what objective ``auto`` means now.
``questions`` are answered beside the broker's loop, with ``weighed``: which other plans came near, and why they are not
made.
"""
