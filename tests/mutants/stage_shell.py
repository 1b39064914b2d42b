"""Mutants of swarm/stage/shell."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="sleepers-wait-their-turn",
        breaks="A thread that waits for a core or a disk counts as asleep, so that a busy worker is reported as hung.",
        target="swarm.stage.shell.beats:Slumber.asleep_s",
        old="if moved or last is None or look.attends or look.ran_s - last.ran_s > BUSY_SHARE * passed_s:",
        new="if moved or last is None or look.ran_s - last.ran_s > BUSY_SHARE * passed_s:",
        caught_by="tests/unit/stage/shell/test_beats.py::test_any_sign_of_work_begins_it_anew",
    ),
    Mutant(
        name="lock-revoked-told-what-waits",
        breaks="Messages queued for a stage are sent after its key is revoked.",
        target="swarm.stage.shell.compute:ComputeThread._change_edge",
        old="if action.key == self._next_key:",
        new="if action.key == self._next_name:",
        caught_by="tests/integration/test_compute_thread.py::test_what_waits_for_who_is_out_for_good_is_not_sent",
    ),
    Mutant(
        name="outbox-sent-twice",
        breaks="Messages that waited for the next stage are sent twice.",
        target="swarm.stage.shell.compute:ComputeThread._flush",
        old="if not self._next.send(frames):",
        new="if not self._next.send(frames) or not self._next.send(frames):",
        caught_by="tests/integration/test_compute_thread.py::test_a_parked_worker_sends_nothing",
    ),
    Mutant(
        name="background-beside-steps",
        breaks="Loading a plan takes half of the time instead of its small share while steps run.",
        target="swarm.stage.shell.loader:Throttle.rest",
        old="rest_s = min(piece_s * (1 / SHARE - 1), LONGEST_REST_S, self.most_rest_s - self.rested_s)",
        new="rest_s = min(piece_s, LONGEST_REST_S, self.most_rest_s - self.rested_s)",
        caught_by="tests/unit/stage/shell/test_loader.py::test_beside_steps_work_takes_its_share_of_the_time",
    ),
)
