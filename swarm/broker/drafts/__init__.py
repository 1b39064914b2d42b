"""Drafts: the plan that would be made now, from what members have said of themselves.

``candidates`` turns members into the planner's devices (``figures``: what they measured) and asks it; ``proposals``
answers what is wanted: the best plan, the one in force if it may stay, the one after a death, and makes of a proposal
the plan to be carried out (``draft``), which refuses what is no pipeline. ``rules`` were set by hand, with an
operator's word before them; ``questions`` are answered beside the broker's loop, with ``weighed``: which other plans
came near, and why they are not made.
Changes nothing: ``recovery`` does.
"""
