"""Mutants of swarm/broker/steps."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="gives-way-for-ever",
        breaks="A sequence can be preempted without limit.",
        target="swarm.broker.steps.kv_capacity:KvAllocator._is_preemptible",
        old="return has_lower_rank and other.num_preempted < MAX_PREEMPTIONS and not self.state.prefix.is_pinned(other.id)",
        new="return has_lower_rank and not self.state.prefix.is_pinned(other.id)",
        caught_by="tests/unit/broker/steps/test_room.py::test_who_gave_way_often_enters_with_all_its_room",
    ),
    Mutant(
        name="source-gives-way",
        breaks="A sequence is preempted while another one is about to copy from it.",
        target="swarm.broker.steps.kv_capacity:KvAllocator._is_preemptible",
        old="return has_lower_rank and other.num_preempted < MAX_PREEMPTIONS and not self.state.prefix.is_pinned(other.id)",
        new="return has_lower_rank and other.num_preempted < MAX_PREEMPTIONS",
        caught_by="tests/unit/broker/steps/test_room.py::test_who_is_about_to_be_copied_from_stays",
    ),
    Mutant(
        name="all-give-way-for-one",
        breaks="Every sequence with a lower claim is preempted, even after enough capacity is free.",
        target="swarm.broker.steps.kv_capacity:KvAllocator._choose_victims",
        old="""
            if missing_blocks <= 0 and missing_slots <= 0:
                break
        """,
        new="",
        caught_by="tests/unit/broker/steps/test_room.py::test_a_higher_class_takes_the_room_of_a_lower_one",
    ),
    Mutant(
        name="running-give-way-before-retired",
        breaks="Running sequences are preempted although evicting retired ones would be enough.",
        target="swarm.broker.steps.kv_capacity:KvAllocator._choose_victims",
        old="missing_blocks -= state.prefix.evictable_blocks(departures)",
        new="pass",
        caught_by="tests/unit/broker/steps/test_room.py::test_retired_ones_go_before_anybody_gives_way",
    ),
    Mutant(
        name="reserved-room-taken-twice",
        breaks="Sequences are admitted by their current length to a stage that reserves their full length.",
        target="swarm.broker.steps.kv_capacity:admission_blocks",
        old="if plan is None or not plan.commits_on_write or sequence.num_preempted >= MAX_PREEMPTIONS:",
        new="if plan is None or sequence.num_preempted >= MAX_PREEMPTIONS:",
        caught_by="tests/unit/broker/steps/test_room.py::test_a_gpu_holds_what_is_reserved",
    ),
    Mutant(
        name="long-grammars-told-at-once",
        breaks="One step carries any number of long grammars.",
        target="swarm.broker.steps.scheduler:_fits_into_header",
        old="return not more or not open_bytes or open_bytes + more <= MAX_OPEN_BYTES",
        new="return True",
        caught_by="tests/unit/broker/steps/test_scheduler.py::test_long_grammars_are_told_over_several_steps",
    ),
    Mutant(
        name="suspects-computed-together",
        breaks="Suspected requests run in one step, so that the guilty one is not identified.",
        target="swarm.broker.steps.scheduler:_choose",
        old="eligible = _choose_eligible(state) if state.evidence.suspects else None",
        new="eligible = None",
        caught_by="tests/unit/broker/members/test_blame.py::test_a_poisonous_request_ends_and_no_other_one",
    ),
    Mutant(
        name="steps-crowd-out-replays",
        breaks="Steps always run before replays, so that a rebuild may wait without end.",
        target="swarm.broker.steps.scheduler:_must_yield_to_replays",
        old="return now - costs.last_done_at < pause_s",
        new="return False",
        caught_by="tests/unit/broker/recovery/test_rebuild.py::test_steps_pause_while_the_layers_of_others_are_rebuilt",
    ),
    Mutant(
        name="stale-acknowledgement-counts",
        breaks="A StepDone from before a preemption counts after it.",
        target="swarm.broker.steps.scheduler:acknowledge",
        old="if sequence is None or sequence.residency != flight.residencies.get(sequence_id):",
        new="if sequence is None:",
        caught_by="tests/unit/broker/state/test_stays.py::test_what_was_under_way_before_a_stay_is_not_acknowledged_in_it",
    ),
    Mutant(
        name="shared-blocks-freed-by-each",
        breaks="Preempting a sequence is taken to free blocks that others share.",
        target="swarm.broker.steps.kv_capacity:KvAllocator._choose_victims",
        old="missing_blocks -= other.blocks - departures.add(other.id) // BLOCK",
        new="missing_blocks -= other.blocks",
        caught_by="tests/unit/broker/steps/test_sharing.py::test_preempting_a_sequence_frees_what_no_other_shares",
    ),
    Mutant(
        name="forks-counted-in-full",
        breaks="A sequence needs blocks for the positions that it shares.",
        target="swarm.broker.steps.kv_capacity:KvAllocator._start_from_prefix",
        old="own_blocks = blocks - state.shared.fork_stop(source, position) // BLOCK if may_share else blocks",
        new="own_blocks = blocks",
        caught_by="tests/unit/broker/steps/test_sharing.py::test_continuations_of_a_prompt_take_its_blocks_once",
    ),
    Mutant(
        name="forks-counted-for-nothing",
        breaks="A sequence that starts from a prefix is admitted without blocks for its other positions.",
        target="swarm.broker.steps.kv_capacity:KvAllocator._start_from_prefix",
        old="own_blocks = blocks - state.shared.fork_stop(source, position) // BLOCK if may_share else blocks",
        new="own_blocks = 0",
        caught_by="tests/unit/broker/steps/test_sharing.py::test_a_prefix_that_is_too_short_is_no_way_in",
    ),
    Mutant(
        name="mappings-without-limit",
        breaks="The broker counts on sharing beyond what the stages can map.",
        target="swarm.broker.steps.kv_capacity:KvAllocator._can_map",
        old="return shared.num_mappings + shared.fork_mappings(source, position) <= self.state.plans.share_mappings",
        new="return True",
        caught_by="tests/unit/broker/steps/test_sharing.py::test_stages_that_cannot_share_count_each_sequence",
    ),
    Mutant(
        name="siblings-compute-their-prompt",
        breaks="The continuations of a prompt all compute it instead of starting from the first one.",
        target="swarm.broker.steps.scheduler:_is_prompt_underway",
        old="position = shareable_positions(sequence, state.shared.unit)",
        new="position = 0",
        caught_by="tests/unit/broker/steps/test_sharing.py::test_continuations_of_a_prompt_take_its_blocks_once",
    ),
    Mutant(
        name="guess-for-suspects",
        breaks="Tokens are proposed for suspects, whose step must show what fails.",
        target="swarm.broker.steps.proposals:max_proposed",
        old="""
            if sequence.id in state.evidence.suspects:
                return 0
        """,
        new="",
        caught_by="tests/unit/broker/steps/test_proposals.py::test_nothing_is_proposed_for_suspects",
    ),
    Mutant(
        name="guess-beyond-the-answer",
        breaks="Tokens are proposed that the answer can not have.",
        target="swarm.broker.steps.proposals:max_proposed",
        old="return min(MAX_PROPOSED, num_missing - 1, (sequence.blocks + free) * BLOCK - sequence.sampled)",
        new="return min(MAX_PROPOSED, num_missing + 1, (sequence.blocks + free) * BLOCK - sequence.sampled)",
        caught_by="tests/unit/broker/steps/test_proposals.py::test_no_more_is_proposed_than_the_answer_may_still_have",
    ),
    Mutant(
        name="guess-beyond-the-blocks",
        breaks="Proposed tokens take blocks that are not free.",
        target="swarm.broker.steps.proposals:max_proposed",
        old="return min(MAX_PROPOSED, num_missing - 1, (sequence.blocks + free) * BLOCK - sequence.sampled)",
        new="return min(MAX_PROPOSED, num_missing - 1)",
        caught_by="tests/unit/broker/steps/test_proposals.py::test_guesses_stay_within_the_own_block_while_another_has_the_rest",
    ),
    Mutant(
        name="guess-beyond-the-step",
        breaks="Proposed tokens exceed the tokens of a step.",
        target="swarm.broker.steps.proposals:choose_proposals",
        old="left = min(step_tokens - sum(count for _, count in chosen), MAX_ROWS - len(chosen))",
        new="left = MAX_ROWS",
        caught_by="tests/unit/broker/steps/test_proposals.py::test_a_step_has_no_more_tokens_than_it_may",
    ),
    Mutant(
        name="guess-longer-than-asked",
        breaks="A proposer may return more tokens than there is room for.",
        target="swarm.broker.steps.proposals:_limit",
        old="tokens = proposal.tokens[: max(0, most)]",
        new="tokens = proposal.tokens",
        caught_by="tests/unit/broker/steps/test_proposals.py::test_a_guess_is_cut_to_what_was_asked_for",
    ),
    Mutant(
        name="guess-outside-of-the-vocabulary",
        breaks="Tokens are sent to the stages that no embedding has.",
        target="swarm.broker.steps.proposals:_limit",
        old="return Proposal(proposal.proposer, tokens[: next(foreign, len(tokens))])",
        new="return Proposal(proposal.proposer, tokens)",
        caught_by="tests/unit/broker/steps/test_proposals.py::test_a_guess_ends_before_a_token_that_no_stage_could_compute",
    ),
    Mutant(
        name="guess-sent-to-older-stages",
        breaks="Steps with proposed tokens go to stages that do not verify them.",
        target="swarm.broker.steps.proposals:choose_proposals",
        old="if not speculation.is_active or not state.rebuilding.is_idle or not _can_verify(state):",
        new="if not speculation.is_active or not state.rebuilding.is_idle:",
        caught_by="tests/unit/broker/steps/test_proposals.py::test_an_older_stage_gets_no_proposals",
    ),
    Mutant(
        name="blocks-of-guesses-kept",
        breaks="Blocks that only refused tokens needed are never free again.",
        target="swarm.broker.state.state:State.return_blocks",
        old="self.running.resize(sequence, blocks)",
        new="pass",
        caught_by="tests/unit/broker/steps/test_proposals.py::test_blocks_of_refused_guesses_are_free_in_the_stages_before_others_get_them",
    ),
    Mutant(
        name="blocks-of-guesses-given-early",
        breaks="Another sequence gets blocks in which the stages still hold refused positions.",
        target="swarm.broker.state.state:State.return_blocks",
        old="self.to_truncate.append(sequence)",
        new="pass",
        caught_by="tests/unit/broker/steps/test_proposals.py::test_blocks_of_refused_guesses_are_free_in_the_stages_before_others_get_them",
    ),
    Mutant(
        name="preempted-for-guesses",
        breaks="A sequence is preempted for blocks that are taken for proposed tokens only.",
        target="swarm.broker.steps.kv_capacity:KvAllocator._choose_victims",
        old="""
            if missing_blocks > 0 and state.borrowed_blocks:
                return None
        """,
        new="",
        caught_by="tests/unit/broker/steps/test_proposals.py::test_nobody_is_preempted_while_blocks_are_borrowed",
    ),
    Mutant(
        name="answer-withheld-for-ever",
        breaks="A sequence waits for ever if the last stage accepts a token and draws none after it.",
        target="swarm.broker.steps.proposals:settle_proposals",
        old="""
            if not sequence.pending:
                sequence.redraw_last()
                state.running.refresh(sequence)
        """,
        new="",
        caught_by="tests/unit/broker/steps/test_proposals.py::test_a_draw_that_is_withheld_is_made_again",
    ),
    Mutant(
        name="inexact-rows-speculate",
        breaks="Tokens are proposed where a row's bits depend on its batch.",
        target="swarm.broker.steps.proposals:_can_verify",
        old='and not ((capacity := state.plans.capacity.get(member)) is not None and "inexact" in capacity.kernels)',
        new="",
        caught_by="tests/unit/broker/steps/test_proposals.py::test_nothing_is_proposed_where_a_rows_bits_depend_on_its_batch",
    ),
    Mutant(
        name="one-wait-stops-all",
        breaks="One sequence that waits for its proposal stops the steps of all others.",
        target="swarm.broker.steps.scheduler:_waits_for_proposals",
        old="return 0 < num_waiting >= len(running.due) - num_waiting + running.num_prefilling",
        new="return 0 < num_waiting",
        caught_by="tests/unit/broker/speculation/test_drafts.py::test_one_sequence_that_waits_does_not_stop_several",
    ),
    Mutant(
        name="waits-outlive-sequences",
        breaks="Steps wait for the proposal of a sequence that has ended.",
        target="swarm.broker.speculation.speculation:Speculation.end_expired",
        old="if now < until and self._tracked[sequence].state is SequenceState.RUNNING",
        new="if now < until",
        caught_by="tests/unit/broker/speculation/test_drafts.py::test_a_wait_ends_with_its_sequence",
    ),
    Mutant(
        name="drafts-for-certain-tokens",
        breaks="A sequence waits for a draft of tokens that its grammar forces.",
        target="swarm.broker.speculation.speculation:Speculation.prepare",
        old="""
            if self._grammar.has_tokens(sequence):
                return
        """,
        new="",
        caught_by="tests/unit/broker/speculation/test_drafts.py::test_a_sequence_whose_next_tokens_are_certain_waits_for_no_draft",
    ),
    Mutant(
        name="grammars-sent-to-drafts",
        breaks="Openings for the draft process contain grammars, and may exceed a frame.",
        target="swarm.broker.speculation.drafts:_entry",
        old="params = structs.replace(sequence.request.submit.params, grammar=None, stop=(), logprobs=None)",
        new="params = sequence.request.submit.params",
        caught_by="tests/unit/broker/speculation/test_drafts.py::test_openings_have_no_grammar_and_fit_into_a_frame",
    ),
    Mutant(
        name="dropped-drafts-never-return",
        breaks="A sequence that the draft process has dropped is never asked for again.",
        target="swarm.broker.speculation.drafts:Drafts.forget",
        old="""
            if self._crowded_out:
                del self._crowded_out[next(iter(self._crowded_out))]
        """,
        new="",
        caught_by="tests/unit/broker/speculation/test_drafts.py::test_a_sequence_that_was_dropped_is_asked_for_when_another_one_has_ended",
    ),
)
