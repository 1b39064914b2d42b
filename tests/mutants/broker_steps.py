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
        old="missing_blocks = blocks - self.free_blocks - state.prefix.evictable_blocks",
        new="missing_blocks = blocks - self.blocks",
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
)
