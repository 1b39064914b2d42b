"""Recovery: one procedure from a loss to the resumed sequence. A first plan, a newcomer and a leave go the same way.

=========  ==============================================  ============================================================
phase      begins with                                     what is done
=========  ==============================================  ============================================================
verdict    a member is lost (``members``) or another plan  ``procedure``: is the plan in force still possible?
           is worth it
plan       at once                                         ``drafts``: who takes the lost layers, soonest first
fence      the new epoch is in the journal                 ``orders``: nothing of an older epoch counts any more (while
                                                           an old plan is whole, only when the next is activated)
load       ``Prepare`` to every stage                      ``procedure``: waits for ``Prepared``; who refuses or dies
                                                           begins it anew
activate   all are prepared                                ``rebuild``: which sequences keep their room, from which
                                                           position; stages cut to it
replay     all are activated, and say what they hold       ``rebuild``: lost layers only, from the log before them, or
                                                           from tokens
resume     a sequence is level                             it goes back to the scheduler; ``state.recoveries`` notes
                                                           what each phase took beside what was predicted
=========  ==============================================  ============================================================

``restart`` says whether a plan is to be made yet, or more workers are waited for first; above all it is for the
broker's own death: what its journal knows is taken up, workers tell what they hold, and the plan goes on if it can.
``detours`` has ways that go by relay tried directly again. ``speeds`` says how quick workers really are. ``orders``
also asks workers to keep layers warm, so that the next load takes no time.
"""
