"""Mutants of swarm/broker/recovery."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="no-fence-sent",
        breaks="Workers are not notified that an epoch has ended.",
        target="swarm.broker.recovery.worker_orders:WorkerOrders.fence",
        old="if not worker.is_gone:",
        new="if False:",
        caught_by="tests/unit/broker/recovery/test_planning.py::test_fence_before_activate_for_everybody",
    ),
    Mutant(
        name="order-not-said-again",
        breaks="The broker does not repeat an order that was lost.",
        target="swarm.broker.recovery.worker_orders:WorkerOrders.tick",
        old="if now < self.state.plans.repeat_orders_at:",
        new="if self.state.plans.repeat_orders_at:",
        caught_by="sim order_lost,crash from 3",
    ),
    Mutant(
        name="epoch-not-checked-on-control",
        breaks="A control message about an older plan counts for the current one.",
        target="swarm.broker.state.plans:PlanState.is_awaited",
        old="return plan is not None and plan.epoch == epoch and incarnation in self.awaited",
        new="return plan is not None and incarnation in self.awaited",
        caught_by="tests/unit/broker/recovery/test_planning.py::test_an_answer_about_an_older_plan_does_not_count",
    ),
    Mutant(
        name="epoch-announced-before-the-journal",
        breaks="Workers receive an epoch that is not in the journal yet.",
        target="swarm.broker.recovery.reconfiguration:Reconfiguration._prepare",
        old="self._out.append(self.make_epoch_record())",
        new="""
            self._out.append(self.make_epoch_record())
            self.on_epoch_written(plans.epoch, self._state.propose)
        """,
        caught_by="sim broker_crash",
    ),
    Mutant(
        name="activated-believed-from-anybody",
        breaks="An Activated message counts although the broker does not wait for it.",
        target="swarm.broker.recovery.activation:Activation.on_activated",
        old="""
            if plans.phase is not PlanPhase.ACTIVATING or not plans.is_awaited(message.incarnation, message.epoch):
                self.state.count("stale_control")
                return
        """,
        new="",
        caught_by="sim crash,freeze,crash_at from 73",
    ),
    Mutant(
        name="who-finds-a-way-shut-is-blamed",
        breaks="A worker that cannot reach the next stage is treated as refusing its layers.",
        target="swarm.broker.recovery.reconfiguration:Reconfiguration.on_refused",
        old="if message.cant_reach == BROKER_NAME or message.cant_reach in self._state.workers:",
        new="if message.cant_reach == BROKER_NAME:",
        caught_by="tests/unit/broker/recovery/test_ways.py::test_another_order_is_found",
    ),
    Mutant(
        name="replay-done-of-another-epoch",
        breaks="A ReplayDone of another epoch counts.",
        target="swarm.broker.recovery.rebuild:Rebuilder._find",
        old="if sequence is None or plan is None or plan.epoch != epoch or not sequence.rebuilds:",
        new="if sequence is None or plan is None or not sequence.rebuilds:",
        caught_by="tests/unit/broker/recovery/test_rebuild.py::test_the_end_of_a_replay_counts_in_its_own_epoch_only",
    ),
    Mutant(
        name="log-never-used",
        breaks="Lost layers are always rebuilt from tokens, never from an activation log.",
        target="swarm.broker.recovery.rebuild_runs:_find_nearest_log",
        old="if reaches and serves and best.boundary < entry.boundary <= layer:",
        new="if reaches and serves and layer < entry.boundary <= best.boundary:",
        caught_by="sim crash from 19",
    ),
    Mutant(
        name="wrong-sequence-on-resume",
        breaks="A stage's KV of one sequence is taken for another's.",
        target="swarm.broker.recovery.rebuild_runs:layer_positions",
        old="held = next((h for h in reports[stage.incarnation].held if h.sequence == sequence.id), None)",
        new="held = next((h for h in reports[stage.incarnation].held if h.sequence >= 0), None)",
        caught_by="sim crash,freeze from 109",
    ),
    Mutant(
        name="merged-rebuild-starts-too-late",
        breaks="Two merged replays begin at the later of their starts.",
        target="swarm.broker.recovery.rebuild_runs:_split",
        old="start = min(lacking.values())",
        new="start = max(lacking.values())",
        caught_by="tests/unit/broker/recovery/test_rebuild.py::test_lost_layers_are_rebuilt_from_the_nearest_log",
    ),
    Mutant(
        name="replay-one-position-short",
        breaks="Rebuilt layers end one position before the committed one.",
        target="swarm.broker.recovery.rebuild_runs:find_rebuild_runs",
        old="target = sequence.kv",
        new="target = max(0, sequence.kv - 1)",
        caught_by="sim crash from 4",
    ),
    Mutant(
        name="another-limit-believed",
        breaks="After a backup replaces the journal, KV of another request with the same number is reused.",
        target="swarm.broker.recovery.rebuild:trusted_positions",
        old="if sequence is None or held.limit != sequence.limit:",
        new="if sequence is None:",
        caught_by="tests/unit/broker/recovery/test_lineage.py::test_what_was_held_for_a_request_of_another_length_is_nothing",
    ),
    Mutant(
        name="lineage-not-compared-at-hello",
        breaks="KV that a worker holds for another journal's sequences is reused.",
        target="swarm.broker.recovery.rebuild:trusted_positions",
        old="""
            if hello.lineage.journal != state.lineage.journal:
                return {}
        """,
        new="",
        caught_by="tests/unit/broker/recovery/test_lineage.py::test_what_is_held_for_another_journal_is_nothing",
    ),
    Mutant(
        name="restored-and-not-taken-back",
        breaks="KV that stages kept over a restart of the broker is computed again.",
        target="swarm.broker.recovery.restart:Restart._resume_sequence",
        old="if position <= 0:",
        new="if position >= 0:",
        caught_by="sim broker_crash",
    ),
    Mutant(
        name="restored-one-position-too-far",
        breaks="KV of the last token counts after a restart, so that its successor is never sampled.",
        target="swarm.broker.recovery.restart:Restart._resume_sequence",
        old="position = min(most, sequence.sampled - 1)",
        new="position = min(most + 1, sequence.sampled)",
        caught_by="sim broker_crash,broker_crash_at from 33",
    ),
    Mutant(
        name="restart-waits-for-nobody",
        breaks="The first plan after a restart does not wait for workers to reconnect.",
        target="swarm.broker.recovery.restart:Restart.begin",
        old="self.progress.rejoin_until, self.progress.gather_until = now + REJOIN_S, now + max(REJOIN_S, gather_s)",
        new="self.progress.rejoin_until, self.progress.gather_until = now, now",
        caught_by="tests/unit/broker/recovery/test_restart.py::test_known_workers_are_waited_for",
    ),
    Mutant(
        name="steps-in-flight-cut-by-a-migration",
        breaks="A change of a whole plan does not wait for the steps in flight, which are computed again.",
        target="swarm.broker.recovery.migration:Migration.finish",
        old="if migration.can_pause and self.state.has_work_in_flight and now < migration.drain_until:",
        new="if False:",
        caught_by="tests/unit/broker/recovery/test_migration.py::test_nothing_is_computed_again",
    ),
    Mutant(
        name="copies-of-other-bits-adopted",
        breaks="A worker takes over keys and values of a worker whose kernels compute other bits.",
        target="swarm.broker.recovery.migration:Migration.on_prepared",
        old="if any(plans.capacity[route.source].bits != bits for route in self._migration.routes_to(incarnation)):",
        new="if False:",
        caught_by="tests/unit/broker/recovery/test_migration.py::test_layers_that_cannot_be_copied_are_replayed",
    ),
    Mutant(
        name="migration-waits-forever",
        breaks="A change of a whole plan waits for the last copies without a deadline.",
        target="swarm.broker.recovery.migration:Migration.finish",
        old="if migration.incomplete and migration.tail_until is not None and now < migration.tail_until:",
        new="if migration.incomplete:",
        caught_by="tests/unit/broker/recovery/test_migration.py::test_late_copies_are_not_waited_for",
    ),
    Mutant(
        name="copies-outlive-their-migration",
        breaks="Workers go on copying for a plan that was given up.",
        target="swarm.broker.recovery.migration:Migration.cancel",
        old="self.order()",
        new="pass",
        caught_by="tests/unit/broker/recovery/test_migration.py::test_receiver_refuses",
    ),
    Mutant(
        name="replay-ordered-while-the-plan-pauses",
        breaks="A replay is continued under a plan that is about to be replaced, and the change cuts it.",
        target="swarm.broker.recovery.rebuild:Rebuilder._start_next",
        old="if not self.state.plans.is_serving:",
        new="if False:",
        caught_by="tests/unit/broker/recovery/test_migration.py"
        "::test_a_sequence_whose_layers_are_being_rebuilt_is_not_waited_for",
    ),
)
