"""Mutants of swarm/broker/state."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="images-by-pixels-alone",
        breaks="A sequence starts from the keys and values of an image that has the same pixels in another shape.",
        target="swarm.params:image_digest",
        old='digest = hashlib.sha256(rows.to_bytes(4, "little") + columns.to_bytes(4, "little"))',
        new="digest = hashlib.sha256()",
        caught_by="tests/unit/broker/steps/test_images.py"
        "::test_an_image_of_the_same_pixels_in_another_shape_shares_nothing",
    ),
    Mutant(
        name="prefix-images-by-tokens-alone",
        breaks="A sequence starts from the keys and values of another image, whose tokens are the same.",
        target="swarm.broker.state.prefix:_block_key",
        old="return xxhash.xxh3_128_digest(before + content + image_content(images, start, stop))",
        new="return xxhash.xxh3_128_digest(before + content)",
        caught_by="tests/unit/broker/state/test_prefix.py::test_equal_tokens_of_another_image_are_others",
    ),
    Mutant(
        name="dropped-without-bound",
        breaks="The ids of dropped requests are kept without bound.",
        target="swarm.broker.state.ended_requests:JournalLookups.record_dropped",
        old="""
            while len(self.dropped_readers) > MAX_DROPPED:
                self.dropped_readers.popitem(last=False)
        """,
        new="",
        caught_by="tests/unit/broker/state/test_archive.py::test_as_many_dropped_ones_are_remembered_as_may_be",
    ),
    Mutant(
        name="a-leaving-reader-takes-questions-along",
        breaks="A gateway that stops reading an answer also loses its pending questions about it.",
        target="swarm.broker.state.ended_requests:JournalLookups.withdraw",
        old="mine = [item for item in waiting if item[0] == client and not isinstance(item[1], RequestQuestion)]",
        new="mine = [item for item in waiting if item[0] == client]",
        caught_by="tests/unit/broker/requests/test_lookups.py::test_a_question_outlives_a_reader_of_the_same_client",
    ),
    Mutant(
        name="unwritten-called-unknown",
        breaks="A request that left memory before its end was written is reported as unknown.",
        target="swarm.broker.state.ended_requests:ForgottenRequests.refusal_for",
        old="of_tenants = self._num_unwritten.get(request_id, Counter())",
        new="of_tenants: Counter[str] = Counter()",
        caught_by="tests/unit/broker/recovery/test_restored.py::test_dropped_while_the_disk_is_full",
    ),
    Mutant(
        name="equal-questions-one-answer",
        breaks="Of equal questions that wait for the journal, only the last one is answered.",
        target="swarm.broker.state.ended_requests:_replaces",
        old="return later == earlier if isinstance(later, LookUp) else True",
        new="return True",
        caught_by="sim from 17",
    ),
    Mutant(
        name="generation-raised-by-one",
        breaks="A journal and its copy reach the same generation.",
        target="swarm.broker.state.journal_snapshot:next_lineage",
        old="return Lineage(journal, former.generation + 1 + random.randrange(_MAX_GENERATION_STEP))",
        new="return Lineage(journal, former.generation + 1)",
        caught_by="tests/unit/broker/journal/test_journal_lineage.py::test_a_journal_and_its_copy_are_told_apart",
    ),
    Mutant(
        name="pinned-let-go",
        breaks="A retired sequence is evicted while another one is about to copy from it.",
        target="swarm.broker.state.prefix:PrefixCache.evict",
        old="""
            if self.is_pinned(sequence):
                continue
        """,
        new="",
        caught_by="tests/unit/broker/state/test_prefix.py::test_what_is_pinned_stays",
    ),
    Mutant(
        name="used-goes-first",
        breaks="The most recently used prefix is evicted first.",
        target="swarm.broker.state.prefix:PrefixCache.find",
        old="self.retired.move_to_end(prefix[0])",
        new="self.retired.move_to_end(prefix[0], last=False)",
        caught_by="tests/unit/broker/state/test_prefix.py::test_eviction_takes_the_longest_unused_first_and_no_more_than_needed",
    ),
    Mutant(
        name="whole-prompt-found",
        breaks="A fully cached prompt leaves no token to compute.",
        target="swarm.broker.state.prefix:PrefixIndex.find",
        old="for index in range((len(tokens) - 1) // BLOCK):",
        new="for index in range(len(tokens) // BLOCK):",
        caught_by="tests/unit/broker/state/test_prefix.py::test_the_last_token_is_never_found",
    ),
    Mutant(
        name="block-without-its-beginning",
        breaks="Blocks with equal tokens count as equal although different tokens precede them.",
        target="swarm.broker.state.prefix:_block_key",
        old="return xxhash.xxh3_128_digest(before + content + image_content(images, start, stop))",
        new="return xxhash.xxh3_128_digest(content + image_content(images, start, stop))",
        caught_by="tests/unit/broker/state/test_prefix.py::test_equal_blocks_at_other_positions_are_others",
    ),
    Mutant(
        name="resume-one-position-late",
        breaks="A resumed sequence skips one position.",
        target="swarm.broker.state.sequences:Sequence._truncate_to",
        old="self._restart_from(position)",
        new="""
            self._restart_from(position)
            self.scheduled = min(position + 1, self.sampled)
        """,
        caught_by="sim crash",
    ),
    Mutant(
        name="stop-string-one-token-late",
        breaks="An answer that ends at a stop string keeps the first token of that string.",
        target="swarm.broker.state.sequences:Sequence.truncate_answer",
        old="keep = self.num_prompt + num_generated",
        new="keep = self.num_prompt + num_generated + 1",
        caught_by="sim",
    ),
    Mutant(
        name="resumed-before-level",
        breaks="A sequence continues while some of its layers are still being rebuilt.",
        target="swarm.broker.state.sequences:Sequence.pending",
        old="return 0 if self.rebuilds or self.is_restoring else len(self.tokens) - self.scheduled",
        new="return len(self.tokens) - self.scheduled",
        caught_by="sim crash from 147",
    ),
    Mutant(
        name="attach-one-token-late",
        breaks="A client that reconnects misses the next token.",
        target="swarm.broker.state.sequences:Sequence.resume_reading",
        old="self.delivered = self.sent = min(self.num_prompt + next_index, self.committed)",
        new="self.delivered = self.sent = min(self.num_prompt + next_index + 1, self.committed)",
        caught_by="sim client_drop,broker_crash from 4",
    ),
    Mutant(
        name="blame-after-own-pause",
        breaks="After a pause of its own, the broker declares all workers silent.",
        target="swarm.broker.state.state:State.shift_deadlines",
        old="""
            for worker in self.workers.values():
                worker.shift_deadlines(pause_s, now)
        """,
        new="",
        caught_by="sim freeze_broker from 9",
    ),
    Mutant(
        name="silence-is-patience",
        breaks="A silent worker is not removed.",
        target="swarm.broker.state.workers:Verdict.is_out",
        old="return self in _OUT_VERDICTS",
        new="return self is not Verdict.SILENT and self in _OUT_VERDICTS",
        caught_by="sim freeze,cut_off",
    ),
    Mutant(
        name="named-address-after-a-shut-relay",
        breaks="Stages connect to an address that a worker reports when the relay is unreachable.",
        target="swarm.broker.state.workers:Routes.block",
        old="is_relayed = has_relay and is_new and name not in self.relay_only",
        new="is_relayed = has_relay and is_new",
        caught_by="tests/unit/broker/recovery/test_ways.py::test_a_way_by_relay_alone_that_is_shut_is_shut",
    ),
    Mutant(
        name="named-address-connected-to",
        breaks="Stages connect to any address that a worker reports.",
        target="swarm.broker.state.workers:Routes.state_of",
        old="return RouteState.RELAYED if target in self.relay_only else RouteState.OPEN",
        new="return RouteState.OPEN",
        caught_by="tests/unit/broker/recovery/test_ways.py::test_nobody_connects_to_an_address_that_is_another_s",
    ),
    Mutant(
        name="relayed-way-tried-again",
        breaks="A new plan uses a relayed connection directly again after a delay, without a successful check.",
        target="swarm.broker.state.workers:Routes.state_of",
        old="if blocked is not None and blocked.is_relayed and not blocked.is_tested:",
        new="if blocked is not None and blocked.is_relayed and not blocked.is_tested and now < blocked.retry_at:",
        caught_by="tests/unit/broker/recovery/test_ways.py::test_what_is_relayed_stays_so_until_a_try_that_nobody_waits_for",
    ),
    Mutant(
        name="shut-for-ever",
        breaks="A connection that failed once is never tried again.",
        target="swarm.broker.state.workers:Routes.state_of",
        old="if blocked is not None and not blocked.is_tested and now < blocked.retry_at:",
        new="if blocked is not None and not blocked.is_tested:",
        caught_by="tests/unit/broker/recovery/test_ways.py::test_a_way_is_tried_again_the_later_the_more_often_that_was_in_vain",
    ),
    Mutant(
        name="sharing-outlives-its-epoch",
        breaks="Sequences count as sharing after a change of plan, in layers that are computed again.",
        target="swarm.broker.state.state:State.clear_stages",
        old="""
            self.prefixes.before, self.shared = self.shared, SharedPositions()
        self.shared.clear(self.plans.share_unit if self.prefix.rules.is_enabled else 0)
        """,
        new="""
            self.prefixes.before = self.shared
        self.shared.unit = self.plans.share_unit
        """,
        caught_by="tests/unit/broker/steps/test_sharing.py::test_a_plan_with_room_for_all_keeps_all",
    ),
    Mutant(
        name="one-stage-may-not-share",
        breaks="Positions count once although one stage can't share them.",
        target="swarm.broker.state.plans:PlanState.share_unit",
        old="unit = lcm(BLOCK, *units) if all(units) and units else 0",
        new="unit = lcm(BLOCK, *filter(None, units)) if any(units) else 0",
        caught_by="tests/unit/broker/steps/test_sharing.py::test_the_unit_of_a_plan_is_the_least_common_one_in_whole_blocks",
    ),
    Mutant(
        name="evicted-prefix-still-shared",
        breaks="An evicted prefix counts as a holder of its blocks for ever.",
        target="swarm.broker.state.prefix:PrefixCache.evict",
        old="blocks -= num_blocks - shared.release(sequence) // BLOCK",
        new="blocks -= num_blocks",
        caught_by="tests/unit/broker/steps/test_sharing.py::test_an_evicted_prefix_leaves_its_blocks_to_those_that_share_them",
    ),
    Mutant(
        name="refused-guess-stays-in-stages",
        breaks="The stages keep the positions of refused tokens.",
        target="swarm.broker.state.sequences:Sequence.refuse_proposals",
        old="self.truncate = True",
        new="pass",
        caught_by="tests/unit/broker/steps/test_proposals.py::test_refused_tokens_are_truncated_by_the_next_step",
    ),
    Mutant(
        name="accepted-guess-computed-again",
        breaks="The position of an accepted token is sent to the stages a second time.",
        target="swarm.broker.state.sequences:Sequence.append_token",
        old="self.scheduled += 1",
        new="pass",
        caught_by="tests/unit/broker/steps/test_proposals.py::test_accepted_tokens_come_in_one_step_and_need_no_truncation",
    ),
    Mutant(
        name="accepted-guess-not-counted",
        breaks="The position of an accepted token does not count as held.",
        target="swarm.broker.state.sequences:Sequence.append_token",
        old="self.kv += 1",
        new="pass",
        caught_by="tests/unit/broker/steps/test_proposals.py::test_accepted_tokens_come_in_one_step_and_need_no_truncation",
    ),
    Mutant(
        name="guess-outlives-its-positions",
        breaks="Proposed tokens count as in flight after their positions were discarded.",
        target="swarm.broker.state.sequences:Sequence._restart_from",
        old="self.proposed.clear()",
        new="pass",
        caught_by="tests/unit/broker/steps/test_proposals.py::test_a_dead_worker_clears_the_guesses",
    ),
)
