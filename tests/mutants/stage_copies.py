"""Mutants of the copies of keys and values in a stage."""

from tests.mutants.mutant import Mutant

COPIES = "tests/unit/stage/test_kv_copies.py"
SENDER = "tests/unit/stage/test_kv_sender.py"

MUTANTS = (
    Mutant(
        name="copies-of-any-epoch",
        breaks="A stage stores copies that were sent under another plan.",
        target="swarm.stage.kv_arrivals:KvArrivals._find_stranger",
        old="if order is None or part.lineage != lineage or part.epoch != order.epoch:",
        new="if order is None or part.lineage != lineage:",
        caught_by=f"{COPIES}::test_a_part_with_anything_wrong_is_dropped_and_counted",
    ),
    Mutant(
        name="copies-of-any-lineage",
        breaks="A stage stores copies of another broker's sequences.",
        target="swarm.stage.kv_arrivals:KvArrivals._find_stranger",
        old="if order is None or part.lineage != lineage or part.epoch != order.epoch:",
        new="if order is None or part.epoch != order.epoch:",
        caught_by=f"{COPIES}::test_a_part_with_anything_wrong_is_dropped_and_counted",
    ),
    Mutant(
        name="copies-with-any-key",
        breaks="A part counts whatever key its sender has.",
        target="swarm.stage.kv_arrivals:KvArrivals._find_stranger",
        old="if event.sender and all(source.key != event.sender for source in sources):",
        new="if False:",
        caught_by=f"{COPIES}::test_only_the_owner_of_the_named_key_sends",
    ),
    Mutant(
        name="copies-of-own-layers",
        breaks="A part overwrites keys and values that the stage computes itself.",
        target="swarm.stage.kv_arrivals:KvArrivals._find_stranger",
        old="""
            wanted = layers_of(source.layers for source in sources) - layers_of(() if layers is None else (layers,))
        """,
        new="wanted = layers_of(source.layers for source in sources)",
        caught_by=f"{COPIES}::test_a_stage_takes_no_copies_of_its_own_layers",
    ),
    Mutant(
        name="gaps-in-copies",
        breaks="A part is stored although positions before it are missing.",
        target="swarm.stage.kv_arrivals:KvArrivals._find_misfit",
        old="if start > held:",
        new="if start > held + 64:",
        caught_by=f"{COPIES}::test_a_gap_leaves_what_is_held_as_it_is",
    ),
    Mutant(
        name="copies-from-other-tokens",
        breaks="A part is stored although its tokens are not the sequence's.",
        target="swarm.stage.kv_arrivals:KvArrivals._has_same_tokens",
        old="if stored is not None and not _agree(stored.history, start, tokens):",
        new="if False:",
        caught_by=f"{COPIES}::test_a_part_with_anything_wrong_is_dropped_and_counted",
    ),
    Mutant(
        name="released-sequences-opened-by-copies",
        breaks="A part on its way opens a sequence again after its release.",
        target="swarm.stage.kv_arrivals:KvArrivals.on_released",
        old="self.released.extend(sequences)",
        new="pass",
        caught_by=f"{COPIES}::test_a_released_sequence_takes_its_copies_along",
    ),
    Mutant(
        name="ended-copies-kept",
        breaks="A worker without a part in the plan keeps the copies of ended sequences.",
        target="swarm.stage.kv_arrivals:KvArrivals.follow",
        old="""
            for sequence in order.ended:
                self.copies.drop(sequence)
        """,
        new="",
        caught_by=f"{COPIES}::test_a_worker_that_sees_no_steps_is_told_which_sequences_ended",
    ),
    Mutant(
        name="copies-kept-when-memory-is-short",
        breaks="Copies stay although the memory is needed.",
        target="swarm.stage.kv_copies:KvCopies.free_memory",
        old="while freed < num_bytes and self.sequences:",
        new="while freed > num_bytes and self.sequences:",
        caught_by=f"{COPIES}::test_when_memory_is_short_the_longest_copies_go_first",
    ),
    Mutant(
        name="slot-shared-whatever-its-limit",
        breaks="A sequence uses the slot that a copy opened with another limit.",
        target="swarm.stage.sequences:SequenceStore._reserve",
        old="if copy.open.limit == item.limit and count_equal(copy.tokens, item.tokens) == num_compared:",
        new="if count_equal(copy.tokens, item.tokens) == num_compared:",
        caught_by=f"{COPIES}::test_a_copy_that_opened_the_slot_shares_it_with_the_stage",
    ),
    Mutant(
        name="copies-survive-a-fork",
        breaks="A sequence that begins as another one keeps copies that its fork has overwritten.",
        target="swarm.stage.sequences:SequenceStore._open",
        old="self.copies.drop(item.sequence)",
        new="",
        caught_by=f"{COPIES}::test_a_fork_begins_without_copies",
    ),
    Mutant(
        name="copies-not-cut-with-their-sequence",
        breaks="Copies count beyond the position to which their sequence was cut.",
        target="swarm.stage.sequences:SequenceStore._truncate",
        old="self.copies.truncate(sequence, position)",
        new="",
        caught_by=f"{COPIES}::test_a_truncation_cuts_the_copies_and_what_counts_as_sent",
    ),
    Mutant(
        name="copies-counted-as-the-live-position",
        breaks="A layer that was taken over counts up to the acknowledged position, which its copies have not reached.",
        target="swarm.stage.sequences:SequenceStore._take_over",
        old="held.advance(LayerRange(layer, layer + 1), position)",
        new="held.advance(LayerRange(layer, layer + 1), position + 6)",
        caught_by=f"{COPIES}::test_finished_blocks_are_copied_and_taken_over",
    ),
    Mutant(
        name="copies-kept-of-cold-layers",
        breaks="Copies of layers that are not warm any more keep their memory.",
        target="swarm.stage.sequences:SequenceStore.keep_only",
        old="self.copies.drop_others(kept)",
        new="",
        caught_by=f"{COPIES}::test_copies_of_warm_layers_stay_and_all_others_go",
    ),
    Mutant(
        name="adopted-sequences-not-compared",
        breaks="A stage computes upon copies that were computed from other tokens.",
        target="swarm.stage.sequences:SequenceStore._open_again",
        old="if held.is_adopted:",
        new="if False:",
        caught_by=f"{COPIES}::test_copies_from_other_tokens_are_found_at_the_first_step",
    ),
    Mutant(
        name="sent-positions-not-cut",
        breaks="Positions that are computed again are not sent again.",
        target="swarm.stage.sequences:StoredSequence.truncate",
        old="sent.position = min(sent.position, position)",
        new="pass",
        caught_by=f"{SENDER}::test_a_truncation_has_what_lies_behind_it_sent_again",
    ),
    Mutant(
        name="unsent-parts-count-as-sent",
        breaks="A part that could not be sent is not sent again.",
        target="swarm.stage.kv_sender:KvSender.on_taken",
        old="part.sent.position = min(part.sent.position, part.before)",
        new="pass",
        caught_by=f"{SENDER}::test_a_part_that_could_not_be_sent_is_sent_later",
    ),
    Mutant(
        name="copies-take-any-time",
        breaks="Copies delay steps without a limit.",
        target="swarm.stage.kv_sender:KvSender._ready_targets",
        old="""
            allowed = {rank: turn.is_idle or budget.refill(now) for rank, budget in self._budgets.items()}
        """,
        new="allowed = dict.fromkeys(self._budgets, True)",
        caught_by=f"{SENDER}::test_between_steps_copies_take_their_share_of_the_time",
    ),
    Mutant(
        name="parts-sent-after-a-fence",
        breaks="A stage goes on sending copies for a plan that has ended.",
        target="swarm.stage.kv_exchange:KvExchange.on_deactivated",
        old="self.actions.extend(self.sender.stop())",
        new="pass",
        caught_by=f"{SENDER}::test_a_fence_ends_sending",
    ),
    Mutant(
        name="incomplete-copies-reported-complete",
        breaks="A change of plan is told that the copies are complete before they are.",
        target="swarm.stage.kv_arrivals:KvArrivals._report_if_complete",
        old="if any(held.get(layer, 0) < item.position for layer in wanted):",
        new="if any(held.get(layer, 0) < item.position // 32 * 32 for layer in wanted):",
        caught_by=f"{COPIES}::test_awaited_positions_are_reported_immediately",
    ),
)
