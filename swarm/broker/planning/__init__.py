"""Planning: the plan that would be made now, from what members have measured and reported.

In: the state, the rules from the settings and from operators, and assumptions for a preview. Out: a ``Proposal`` (which
worker would hold which layers, with a forecast), or a ``Shortage`` as text; and the plan to be carried out, made of a
proposal. Rules: an operator's command overrides the settings; no worker gets layers that it has just refused; a plan
that can go on stays, unless the change is worth it. Changes nothing: ``recovery`` carries plans out.

``proposals`` is the entry point: the best plan, the active one if it may stay, the plan after a loss, and ``draft``,
which rejects a plan that is no pipeline. ``candidates`` turns members into the planner's devices (``measurements``:
their figures) and asks the planner. ``rules`` are the constraints on plans; ``demand`` judges by the load which
objective ``auto`` means now. ``plan_query`` holds searches that run outside the broker's loop, with ``alternatives``:
which other plans came close, and why they are not made.
"""
