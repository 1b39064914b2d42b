"""Mutants of the copies of keys and values in swarm/broker/recovery."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="senders-ordered-before-holders",
        breaks="Senders are ordered before the holders that must accept their parts.",
        target="swarm.broker.recovery.kv_copies:order_copies",
        old="""
            _order_receivers(state, out, plan.epoch, orders, {route.holder for route in again})
            _order_senders(state, out, plan.epoch, orders, {route.source for route in again})
        """,
        new="""
            _order_senders(state, out, plan.epoch, orders, {route.source for route in again})
            _order_receivers(state, out, plan.epoch, orders, {route.holder for route in again})
        """,
        caught_by="tests/unit/broker/recovery/test_kv_copies.py::test_every_layer_has_one_holder_that_keeps_it_warm",
    ),
    Mutant(
        name="reports-of-an-earlier-plan-count",
        breaks="A report of copies under an earlier plan counts.",
        target="swarm.broker.recovery.kv_copies:KvCopies.on_held",
        old="if current is None or message.epoch < current.epoch:",
        new="if current is None:",
        caught_by="tests/unit/broker/recovery/test_kv_copies.py::test_reports_of_an_earlier_plan_do_not_count",
    ),
    Mutant(
        name="copies-of-other-bits",
        breaks="A worker whose kernels compute other bits is chosen to hold copies.",
        target="swarm.broker.recovery.kv_holders:_can_copy",
        old="and bits == reported_bits(state, holder.incarnation)",
        new="and True",
        caught_by="tests/unit/broker/recovery/test_kv_copies.py::test_to_whom_nothing_is_copied",
    ),
    Mutant(
        name="copies-of-ended-sequences-stay",
        breaks="Holders without a part in the plan keep the copies of ended sequences.",
        target="swarm.broker.recovery.kv_copies:KvCopies._drop_ended",
        old="if ended and worker is not None and not worker.is_gone:",
        new="if False:",
        caught_by="tests/unit/broker/recovery/test_kv_copies.py::test_copies_of_ended_sequences_are_dropped",
    ),
    Mutant(
        name="copies-that-stand-still-stay-so",
        breaks="Copies that lost a part are never ordered again.",
        target="swarm.broker.recovery.kv_copies:KvCopies._find_standing_still",
        old="again.add(route)",
        new="pass",
        caught_by="tests/unit/broker/recovery/test_kv_copies.py::test_a_route_that_stands_still_is_ordered_again_from_what_is_held",
    ),
    Mutant(
        name="copying-begins-with-steps-in-flight",
        breaks="The last positions are ordered while steps are in flight.",
        target="swarm.broker.recovery.migration:Migration.finish",
        old="if migration.can_pause and self.state.has_work_in_flight and now < migration.drain_until:",
        new="if False:",
        caught_by="tests/unit/broker/recovery/test_migration.py::test_nothing_is_computed_again",
    ),
    Mutant(
        name="a-change-waits-for-copies-for-ever",
        breaks="A change of plan waits for copies without a deadline.",
        target="swarm.broker.recovery.migration:Migration.is_near",
        old="return now >= self._migration.wait_until or not any(map(self._is_behind, self._migration.holders))",
        new="return not any(map(self._is_behind, self._migration.holders))",
        caught_by="tests/unit/broker/recovery/test_migration.py::test_late_copies_are_not_waited_for",
    ),
    Mutant(
        name="unlike-bits-migrate",
        breaks="Keys and values move to a worker whose kernels compute other bits.",
        target="swarm.broker.recovery.migration:Migration.on_prepared",
        old="if any(plans.capacity[route.source].bits != bits for route in self._migration.routes_to(incarnation)):",
        new="if False:",
        caught_by="tests/unit/broker/recovery/test_migration.py::test_layers_that_cannot_be_copied_are_replayed",
    ),
    Mutant(
        name="foreign-tokens-of-copies-count",
        breaks="Positions taken over from copies count although their tokens are not the sequence's.",
        target="swarm.broker.recovery.rebuild:_trust_digests",
        old="if not held.digests or sequence is None:",
        new="if True:",
        caught_by="tests/unit/broker/recovery/test_kv_copies.py::test_what_a_stage_took_over_from_copies_counts_as_far_as_its_tokens_are_right",
    ),
    Mutant(
        name="rebuild-from-the-furthest-layer",
        breaks="A rebuild starts at the position of the layer that holds most.",
        target="swarm.broker.recovery.rebuild_runs:_split",
        old="start = min(lacking.values())",
        new="start = max(lacking.values())",
        caught_by="tests/unit/broker/recovery/test_rebuild.py::test_lost_layers_are_rebuilt_from_the_nearest_log",
    ),
    Mutant(
        name="suspects-share-a-step",
        breaks="A sequence that was in flight at several deaths is replayed in a step with others.",
        target="swarm.broker.recovery.rebuild:Rebuilder._can_share_step",
        old="is_suspect = sequence.id in self.state.evidence.suspects or sequence.num_deaths > 1",
        new="is_suspect = False",
        caught_by="tests/unit/broker/recovery/test_rebuild.py::test_a_suspect_is_replayed_alone",
    ),
    Mutant(
        name="shared-steps-for-old-workers",
        breaks="A worker of an older protocol is ordered to replay several sequences in one step.",
        target="swarm.broker.recovery.rebuild:Rebuilder._can_share_step",
        old="max(worker.hello.wire_versions) >= SHARED_STEP_VERSION for worker in members",
        new="True for worker in members",
        caught_by="tests/unit/broker/recovery/test_rebuild.py::test_an_old_worker_gets_a_step_for_each_sequence",
    ),
    Mutant(
        name="only-the-first-of-a-step-is-done",
        breaks="Of a replay step only the first sequence counts as done.",
        target="swarm.broker.recovery.rebuild:Rebuilder.on_replay_done",
        old="for reached in (SequencePosition(message.sequence, message.kv), *message.more):",
        new="for reached in (SequencePosition(message.sequence, message.kv),):",
        caught_by="tests/unit/broker/recovery/test_rebuild.py::test_short_replays_of_several_sequences_share_a_step",
    ),
    Mutant(
        name="copies-in-front-save-everything",
        breaks="The planner counts no replay for a layer with copies, whatever the layers behind it lack.",
        target="swarm.broker.planner.lost_positions:run_sums",
        old="needed = np.maximum.accumulate(positions[:stop][::-1])[::-1]",
        new="needed = positions[:stop]",
        caught_by="tests/unit/broker/planner/test_plan_recover.py::test_runs_by_exhaustive_search",
    ),
    Mutant(
        name="a-log-with-a-gap-is-used",
        breaks="Lost positions are rebuilt from a log that begins behind the first of them.",
        target="swarm.broker.recovery.rebuild_runs:_find_nearest_log",
        old="serves = entry.sequence == wanted.sequence and entry.start <= wanted.start and enough <= entry.stop",
        new="serves = entry.sequence == wanted.sequence and enough <= entry.stop",
        caught_by="tests/unit/broker/recovery/test_rebuild.py::test_a_log_without_its_beginning_serves_what_copies_lack",
    ),
    Mutant(
        name="copies-with-other-bits-are-taken-over",
        breaks="A holder takes copies over although it computes other bits with the layers of the next plan.",
        target="swarm.broker.recovery.kv_copies:KvCopies.drop_unlike",
        old="if not unlike:",
        new="if True:",
        caught_by="tests/unit/broker/recovery/test_migration.py::test_copies_of_a_sender_that_dies_count_only_with_equal_bits",
    ),
    Mutant(
        name="a-suspect-s-step-follows-others",
        breaks="A suspect's step is sent while steps of others are in flight.",
        target="swarm.broker.steps.scheduler:_choose_eligible",
        old="if in_flight:",
        new="if False:",
        caught_by="tests/unit/broker/members/test_blame.py::test_a_suspect_s_step_is_alone_in_flight",
    ),
)
