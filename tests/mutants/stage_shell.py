"""Mutants of swarm/stage/shell."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="sleepers-wait-their-turn",
        breaks="A thread that waits for a core or a disk counts as asleep, so that a busy worker is reported as hung.",
        target="swarm.stage.shell.heartbeat:SleepDetector.update",
        old="if moved or last is None or sample.is_active or sample.ran_s - last.ran_s > BUSY_SHARE * passed_s:",
        new="if moved or last is None or sample.ran_s - last.ran_s > BUSY_SHARE * passed_s:",
        caught_by="tests/unit/stage/shell/test_beats.py::test_any_sign_of_work_begins_it_anew",
    ),
    Mutant(
        name="lock-revoked-told-what-waits",
        breaks="Messages queued for a stage are sent after its key is revoked.",
        target="swarm.stage.shell.compute:ComputeThread._change_connection",
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
        old="rest_s = min(piece_s * (1 / BACKGROUND_SHARE - 1), MAX_REST_S, self.max_rest_s - self.rested_s)",
        new="rest_s = min(piece_s, MAX_REST_S, self.max_rest_s - self.rested_s)",
        caught_by="tests/unit/stage/shell/test_loader.py::test_beside_steps_work_takes_its_share_of_the_time",
    ),
    Mutant(
        name="kv-full-receiver-reads-on",
        breaks="A receiver of copies takes any number of parts into memory while the compute thread is busy.",
        target="swarm.stage.shell.kv_receiver:KvReceiver._run_once",
        old="while self._has_room and not self._stopping and (frames := self._pull.receive()) is not None:",
        new="while not self._stopping and (frames := self._pull.receive()) is not None:",
        caught_by="tests/integration/test_kv_connections.py::test_few_parts_wait_for_the_compute_thread",
    ),
    Mutant(
        name="kv-unchecked-parts",
        breaks="A part of a copy without a checksum is stored.",
        target="swarm.stage.shell.kv_receiver:KvReceiver._decode",
        old="if not part.tensor.checksum:",
        new="if part.tensor.checksum is None:",
        caught_by="tests/integration/test_kv_connections.py::test_what_is_no_part_is_dropped",
    ),
    Mutant(
        name="kv-memory-counted-once",
        breaks="Parts that arrive between two measurements all find the same free memory.",
        target="swarm.stage.shell.kv_traffic:KvTraffic.next_event",
        old="self.free_bytes -= received.data.numbers.nbytes",
        new="self.free_bytes -= 0",
        caught_by="tests/unit/stage/shell/test_kv_traffic.py"
        "::test_arrived_parts_come_first_and_use_up_the_memory_that_was_measured",
    ),
)
