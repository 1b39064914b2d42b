"""Recovery: one procedure from a loss to the resumed sequence. First plans, joins and leaves take the same path.

=========  ==============================================  ============================================================
phase      begins when                                     what happens
=========  ==============================================  ============================================================
verdict    a member is lost (``members``) or another plan  ``reconfiguration``: is the active plan still possible?
           is worth it
plan       immediately                                     ``planning``: which workers take the lost layers, the
                                                           soonest way first
fence      the new epoch is in the journal                 ``worker_orders``: nothing of an older epoch counts any more
                                                           (while an old plan is whole, only when the next is activated)
load       ``Prepare`` is sent to every stage              ``reconfiguration``: waits for ``Prepared``; a refusal or a
                                                           loss starts it again
copy       all stages are prepared, and an old plan is     ``migration``: dispatching pauses until the last keys and
           whole                                           values of moved layers are at their new holders
activate   all stages are prepared, and copies are made    ``activation``, ``rebuild``: which sequences keep their KV
                                                           capacity, from which position; stages cut to it
replay     all stages are activated, and report what they  ``rebuild``: lost layers only, from the log before them, or
           hold                                            from tokens, as far as copies do not reach
resume     a sequence is complete in all stages            it goes back to the scheduler; ``state.recoveries`` records
                                                           the predicted and the measured time of each phase
=========  ==============================================  ============================================================

``restart`` decides whether to make a plan yet, or to wait for more workers first. Above all it covers the broker's own
death: it restores the journal's content, workers report what they hold, and the plan continues if it can.
``route_retries`` retries direct routes in place of relayed ones. ``speeds`` measures how quick workers really are.
``worker_orders`` also asks workers to keep layers warm, so that the next load takes no time, and ``kv_copies`` to hold
copies of keys and values, so that the next replay is short.
"""
