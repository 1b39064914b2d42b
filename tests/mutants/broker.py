"""Mutants of swarm/broker."""

from tests.mutants.mutant import Edit, Mutant

MUTANTS = (
    Mutant(
        name="lock-disk-holds-up-the-loop",
        breaks="The broker's event loop waits for the disk while keys are saved.",
        target="swarm.broker.auth.writer:KeyStoreWriter._apply",
        old="await asyncio.to_thread(self._write, result)",
        new="self._write(result)",
        caught_by="tests/unit/broker/test_locks.py::test_a_slow_disk_holds_up_nobody_but_who_asked",
    ),
    Mutant(
        name="lock-refused-by-the-disk-untold",
        breaks="The requester of a key change gets no error when the disk refuses it.",
        target="swarm.broker.auth.writer:KeyStoreWriter.run_next",
        old="outcome = refusal",
        new="outcome = None",
        caught_by="tests/unit/broker/test_locks.py::test_what_the_disk_refuses_is_not_so",
    ),
    Mutant(
        name="epoch-forgotten-at-restart",
        breaks="A restarted broker starts again with epoch 1.",
        target="swarm.broker.core:BrokerCore._restore",
        old="self.state.plans.resume_above(snapshot.epoch)",
        new="self.state.plans.resume_above(min(snapshot.epoch, 1))",
        caught_by="sim broker_crash,all_crash from 19",
    ),
    Mutant(
        name="epoch-not-checked-on-step-done",
        breaks="A StepDone of an older epoch counts.",
        target="swarm.broker.core:BrokerCore._on_step_finished",
        old="is_current = current is not None and current.epoch == done.epoch and done.lineage == self.state.lineage",
        new="is_current = current is not None",
        caught_by="sim crash,freeze",
        also=(
            Edit(
                target="swarm.broker.state.state:State.clear_stages",
                old="self.in_flight.clear()",
                new="",
            ),
        ),
    ),
    Mutant(
        name="lineage-not-compared-on-step-done",
        breaks="The broker accepts a StepDone for an earlier broker if epoch and number are equal.",
        target="swarm.broker.core:BrokerCore._on_step_finished",
        old="is_current = current is not None and current.epoch == done.epoch and done.lineage == self.state.lineage",
        new="is_current = current is not None and current.epoch == done.epoch",
        caught_by="tests/unit/broker/recovery/test_lineage.py::test_a_step_of_another_broker_does_not_count",
    ),
    Mutant(
        name="step-done-counts-twice",
        breaks="A duplicate StepDone counts twice.",
        target="swarm.broker.core:BrokerCore._on_step_finished",
        old="""
            if flight is None:
                self.state.count("stale_steps")
                return
        """,
        new="""
            if flight is None and (current is None or done.epoch != current.epoch):
                self.state.count("stale_steps")
                return
            from swarm.broker.state import InFlightStep

            flight = flight or InFlightStep((), now)
        """,
        caught_by="sim join from 10",
        also=(
            Edit(
                target="swarm.broker.requests.tokens:TokenCollector.collect",
                old="""
                    if item.position != sequence.sampled or not _may_follow(sequence, flight, added.get(sequence, ())):
                        self._state.count("misplaced_tokens")
                        continue
                """,
                new="",
            ),
        ),
    ),
    Mutant(
        name="lock-key-not-proven",
        breaks="A client can enrol a public key without proving that it has the secret key.",
        target="swarm.broker.auth.access:AccessControl._enrol",
        old="if not is_proven(message.proof, message.key, key, self.broker_keys.pairs):",
        new="if False:",
        caught_by="tests/unit/broker/test_locks.py::test_who_enrols_a_key_must_hold_it",
    ),
    Mutant(
        name="lock-old-key-lives-on",
        breaks="A member's old key stays valid after the member has used the new one.",
        target="swarm.broker.auth.access:AccessControl._on_connected",
        old="if key and self._file.registry.record_use(key) is not self._file.registry:",
        new="if not key and self._file.registry.record_use(key) is not self._file.registry:",
        caught_by="tests/unit/broker/test_locks.py::test_who_knocks_with_its_new_key_does_without_the_old_one",
    ),
    Mutant(
        name="lock-kept-of-another-key",
        breaks="A member that stored any key of the broker counts as having the new one.",
        target="swarm.broker.auth.access:AccessControl.record_broker_key",
        old="""
            if broker != self.broker_keys.public:
                return
        """,
        new="broker = self.broker_keys.public",
        caught_by="tests/unit/broker/test_locks.py::test_the_old_key_is_answered_to_until_all_know_the_new_one",
    ),
    Mutant(
        name="lock-anybodys-name",
        breaks="A remote worker may take any name that no member owns, such as a local worker's.",
        target="swarm.broker.auth.access:AccessControl.name_error",
        old='if not key or own == owner != "":',
        new='if not key or own == owner != "" or not owner:',
        caught_by="tests/unit/broker/test_locks.py::test_a_worker_is_called_as_its_machine_is",
    ),
    Mutant(
        name="lock-speaks-for-another",
        breaks="A member can send a Hello under the identity of another process.",
        target="swarm.broker.message_server:_check_sender",
        old="if named is not None and named.encode() != peer:",
        new="if named is not None and not peer:",
        caught_by="tests/integration/test_membership.py::test_nobody_speaks_for_another_process",
    ),
)
