"""Mutants of swarm/broker/members."""

from tests.mutants.mutant import Edit, Mutant

MUTANTS = (
    Mutant(
        name="request-convicted-unheard",
        breaks="A request is failed for failing steps although no other request has succeeded on those workers.",
        target="swarm.broker.members.blame:Blame._is_guilty",
        old="if any(request_id in failure.vouched for failure in failures):",
        new="if failures:",
        caught_by="sim device_breaks,compute_fails from 5",
    ),
    Mutant(
        name="failing-worker-stays",
        breaks="A worker whose steps always fail is never removed.",
        target="swarm.broker.members.blame:Blame._why_out",
        old="if len(in_row) >= FAILED_AFTER and not _in_all(in_row):",
        new="if len(in_row) >= 1000 and not _in_all(in_row):",
        caught_by="sim device_breaks from 5",
        also=(
            Edit(
                target="swarm.broker.members.blame:Blame._why_out",
                old="if len(in_row) >= (GUILTY_AFTER if is_needed else FAILED_AFTER):",
                new="if len(in_row) >= 1000:",
            ),
        ),
    ),
    Mutant(
        name="door-opens-without-room",
        breaks="The broker accepts connections again as soon as one file descriptor is free.",
        target="swarm.broker.members.doors:Doors._look",
        old="if limit - used < room_for_opening(limit):",
        new="if limit - used < 1:",
        caught_by="tests/unit/broker/members/test_doors.py::test_it_opens_when_there_is_room_and_not_before",
    ),
    Mutant(
        name="hello-moves-the-epoch",
        breaks="The epoch that a worker reports in its Hello raises the broker's epoch.",
        target="swarm.broker.members.entry:Entry._let_in",
        old="self._take_model(hello, now)",
        new="""
            self._take_model(hello, now)
            self._state.book.epoch = max(self._state.book.epoch, hello.epoch)
        """,
        caught_by="tests/unit/broker/recovery/test_lineage.py::test_no_hello_moves_a_number",
    ),
    Mutant(
        name="verdict-by-reconnection",
        breaks="A worker that rejoins over a new connection keeps its former state.",
        target="swarm.broker.members.entry:Entry._let_in",
        old="if known is not None and not known.is_gone:",
        new="""
            if known is not None:
                known.state = WorkerState.MEMBER
                return
            if known is not None:
        """,
        caught_by="sim control_drop,cut_off",
    ),
    Mutant(
        name="replaced-comes-back",
        breaks="A worker process that was told to exit is accepted again.",
        target="swarm.broker.members.entry:Entry.hello",
        old="reason = self._state.replaced.get(hello.incarnation) or why_not(hello, self._state, restart, rules)",
        new="reason = why_not(hello, self._state, restart, rules)",
        caught_by="tests/unit/broker/members/test_names.py::test_who_was_refused_is_told_so_again_at_once",
    ),
    Mutant(
        name="lock-a-name-of-this-machine-taken",
        breaks="A remote worker replaces a local worker of the same name.",
        target="swarm.broker.members.entry:_is_anothers",
        old="return any(worker.belongs_to != owner and worker.state is not WorkerState.LEFT for worker in found)",
        new="return any(False and worker.state is not WorkerState.LEFT for worker in found)",
        caught_by="tests/unit/broker/recovery/test_planning.py::test_a_worker_of_the_brokers_machine_is_not_replaced_from_elsewhere",
    ),
    Mutant(
        name="dtype-of-any-kind-joins",
        breaks="Workers with different weight types serve one model, so that results depend on the plan.",
        target="swarm.broker.members.entry:other_dtype",
        old='return dtype if dtype != hello.dtype else ""',
        new='return ""',
        caught_by="tests/unit/broker/members/test_dtype.py::test_the_first_worker_s_dtype_is_the_swarm_s",
    ),
    Mutant(
        name="late-beats-are-silence",
        breaks="The silence limit ignores how irregular a worker's heartbeats are.",
        target="swarm.broker.members.health:_allowed_silence_s",
        old="return min(settings.beat_timeout_s, max(settings.beat_least_s, LATE_FACTOR * pulse.longest_s))",
        new="return min(settings.beat_timeout_s, settings.beat_least_s)",
        caught_by="tests/unit/broker/members/test_health.py::test_whose_beats_come_evenly_is_missed_sooner",
    ),
    Mutant(
        name="former-last-stage-heard",
        breaks="The broker accepts results from the last stage of a plan that is no longer active.",
        target="swarm.broker.members.keyring:Keyring.changes",
        old='wanted = {"data": frozenset() if last is None else frozenset((last,))}',
        new='wanted = {} if last is None else {"data": frozenset((last,))}',
        caught_by="sim crash,freeze from 19",
    ),
    Mutant(
        name="relay-passes-on-for-ever",
        breaks="The relay keeps tickets that no plan uses.",
        target="swarm.broker.members.keyring:Keyring.changes",
        old="if tickets != self.book.passed_on:",
        new="if not tickets <= self.book.passed_on:",
        caught_by="tests/unit/broker/recovery/test_ways.py::test_the_relay_passes_on_what_plans_say_and_no_longer",
    ),
    Mutant(
        name="beats-in-anothers-name",
        breaks="An authenticated worker may send heartbeats in another worker's name.",
        target="swarm.broker.members.keyring:Keyring.tells_apart",
        old='return self.own is not None and key != (said or "")',
        new="return self.own is not None and not key",
        caught_by="tests/unit/broker/members/test_keyring.py::test_a_beat_under_anothers_name_does_not_count",
    ),
    Mutant(
        name="name-of-who-lives-taken",
        breaks="A second process removes a live worker of the same name.",
        target="swarm.broker.members.names:gives_way",
        old="if former.wants_to_leave or (former.belongs_to and not owner):",
        new="if former is not None:",
        caught_by="sim double",
    ),
    Mutant(
        name="name-of-whose-connection-was-cut-taken",
        breaks="A second process takes the name of a worker whose connection was cut a moment ago.",
        target="swarm.broker.members.names:holder",
        old="return next((worker for worker in others if not worker.is_gone or _beats_on(worker, state.now)), None)",
        new="return next((worker for worker in others if not worker.is_gone), None)",
        caught_by="tests/unit/broker/members/test_names.py::test_one_whose_connection_alone_was_cut_keeps_its_name",
    ),
    Mutant(
        name="name-refused-to-its-heir",
        breaks="A heartbeat that was in flight when a worker died counts as a later one, so its successor is rejected.",
        target="swarm.broker.members.names:is_proven",
        old="return former.pulse.beat_at is not None and former.pulse.beat_at >= since + PROOF_S",
        new="return former.pulse.beat_at is not None and former.pulse.beat_at >= since",
        caught_by="tests/unit/broker/members/test_names.py::test_one_that_fell_silent_is_replaced_when_that_is_known",
    ),
    Mutant(
        name="closed-connection-ignored",
        breaks="A worker whose connection closes is lost only after the heartbeat timeout.",
        target="swarm.broker.members.roster:Members.disconnected",
        old="if worker is not None:",
        new="if worker is not None and worker.is_gone:",
        caught_by="sim crash",
    ),
    Mutant(
        name="lock-revoked-heard-by-its-neighbours",
        breaks="A worker's neighbours are not notified that its key is revoked.",
        target="swarm.broker.members.roster:Members.key_revoked",
        old="if self.keyring.revoke(key):",
        new="if self.keyring.revoke(key) and not key:",
        caught_by="tests/unit/broker/members/test_keyring.py::test_the_others_are_told_who_is_out_for_good",
    ),
    Mutant(
        name="revoked-worker-kept",
        breaks="A worker whose key is revoked stays a member.",
        target="swarm.broker.members.roster:Members.key_revoked",
        old="self._lose(worker, REVOKED, now)",
        new="",
        caught_by="sim crash,freeze from 19",
    ),
    Mutant(
        name="lineage-not-compared-on-control",
        breaks="A control message for an earlier broker counts if the epoch is equal.",
        target="swarm.broker.members.roster:Members.said",
        old="elif message.lineage != self._state.lineage and not isinstance(message, Leaving | Stats):",
        new="elif message.lineage != self._state.lineage and isinstance(message, Hello):",
        caught_by="tests/unit/broker/recovery/test_lineage.py::test_an_answer_to_another_broker_does_not_count",
    ),
    Mutant(
        name="quarantine-never",
        breaks="A request that kills each worker is retried without limit.",
        target="swarm.broker.members.trust:Lies.dangerous",
        old="present = [s for s in (*self.state.running, *self.state.waiting) if s.num_deaths >= QUARANTINE_AFTER]",
        new="present = [s for s in (*self.state.running, *self.state.waiting) if s.num_deaths > 1000]",
        caught_by="tests/unit/broker/recovery/test_planning.py::test_quarantine_after_three_deaths",
    ),
    Mutant(
        name="warning-told-nowhere",
        breaks="The broker logs a warning that docs/warnings.md does not explain.",
        target="swarm.broker.members.vigil:LostSteps.tick",
        old='self.out.note("steps_lost", "error", steps=sorted(self.state.flights))',
        new='self.out.note("steps_are_lost", "error", steps=sorted(self.state.flights))',
        caught_by="tests/unit/test_warnings.py::test_every_warning_is_explained",
    ),
)
