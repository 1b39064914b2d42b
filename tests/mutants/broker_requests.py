"""Mutants of swarm/broker/requests."""

from tests.mutants.mutant import Edit, Mutant

MUTANTS = (
    Mutant(
        name="a-flood-is-read-on",
        breaks="A member's CPU time budget is full again at each message, so a flood is read without a pause.",
        target="swarm.broker.requests.cpu_budget:CpuBudget.charge",
        old="left = min(BURST_S, left + (now - at) * SHARE) - seconds",
        new="left = BURST_S - seconds",
        caught_by="tests/unit/broker/requests/test_allowance.py::test_who_goes_on_and_on_has_its_share_of_the_time",
    ),
    Mutant(
        name="written-again-without-logprobs",
        breaks="Tokens that are written to the journal again lose their log-probabilities.",
        target="swarm.broker.requests.durability:RequestDurability._write_whole",
        old="logprobs=tuple(sequence.logprobs) if submit.params.logprobs is not None else (),",
        new="logprobs=(),",
        caught_by="tests/unit/broker/recovery/test_restored.py::test_what_is_written_once_more_is_written_whole",
    ),
    Mutant(
        name="numbers-of-a-lost-journal-again",
        breaks="A renewed journal reuses sequence numbers that workers hold KV for.",
        target="swarm.broker.requests.durability:RequestDurability.on_journal_renewed",
        old="self._state.next_sequence = max(self._state.next_sequence, next_sequence)",
        new="self._state.next_sequence = min(self._state.next_sequence, next_sequence)",
        caught_by="tests/unit/broker/journal/test_rewritten.py::test_numbers_that_the_new_one_uses_are_passed_over",
    ),
    Mutant(
        name="renewed-journal-lacks-requests",
        breaks="A renewed journal contains the epoch but not the requests.",
        target="swarm.broker.requests.durability:RequestDurability.on_journal_renewed",
        old="for request in self._state.requests.values():",
        new="for request in ():",
        caught_by="sim journal_lost",
    ),
    Mutant(
        name="rewritten-deadlines-begin-anew",
        breaks="A request that is written to a renewed journal gets a new arrival time.",
        target="swarm.broker.requests.durability:RequestDurability.on_journal_renewed",
        old="self._out.append(WriteAcceptance(request.submit, sequence_ids, request.tenant, now - request.arrived_at))",
        new="self._out.append(WriteAcceptance(request.submit, sequence_ids, request.tenant))",
        caught_by="tests/unit/broker/journal/test_rewritten.py::test_as_old_as_they_are",
    ),
    Mutant(
        name="sequence-numbers-start-anew",
        breaks="A restarted broker reuses sequence numbers.",
        target="swarm.broker.requests.durability:RequestDurability.restore",
        old="self._state.next_sequence = snapshot.next_sequence",
        new="self._state.next_sequence = min(snapshot.next_sequence, 2)",
        caught_by="sim broker_crash",
    ),
    Mutant(
        name="deadline-begins-anew",
        breaks="A request's deadline starts again when the broker restarts.",
        target="swarm.broker.requests.durability:restore_request",
        old="submit, arrived_at = record.submit, now - record.age_s",
        new="submit, arrived_at = record.submit, now",
        caught_by="sim broker_crash,broker_crash_at,broker_loop from 24",
    ),
    Mutant(
        name="ended-restored-as-running",
        breaks="A request that ended runs again after a restart of the broker.",
        target="swarm.broker.requests.durability:restore_request",
        old="if item.reason is not None:",
        new='if item.reason == "failed":',
        caught_by="sim broker_crash from 4",
    ),
    Mutant(
        name="restored-draws-as-the-first",
        breaks="All continuations of a restored request use the seed of the first.",
        target="swarm.broker.requests.durability:restore_request",
        old="seed=derive_seed(submit.seed, item.index),",
        new="seed=derive_seed(submit.seed, 0),",
        caught_by="tests/unit/broker/recovery/test_restored.py::test_seeds_are_those_of_before",
    ),
    Mutant(
        name="detached-given-up",
        breaks="A detached request is cancelled when no client reads it.",
        target="swarm.broker.requests.completion:Completer._is_abandoned",
        old="if request.submit.detached or request.detached_at is None:",
        new="if request.detached_at is None:",
        caught_by="tests/unit/broker/recovery/test_restored.py::test_a_detached_request_outlives_its_client",
    ),
    Mutant(
        name="terminal-state-overwritten",
        breaks="A sequence that has ended can end again with another reason.",
        target="swarm.broker.requests.completion:Completer.end",
        old="""
            if sequence.state is SequenceState.ENDED:
                return
        """,
        new="",
        caught_by="sim client_drop,crash from 17",
    ),
    Mutant(
        name="read-by-one-forgotten-for-all",
        breaks="A request is forgotten after one client has read it, although the journal does not have its end.",
        target="swarm.broker.requests.completion:Completer.forget_if_delivered",
        old="is_spare = request.is_end_written if self._settings.has_journal else reader == request.owner",
        new="is_spare = all(self._delivery.is_end_durable(sequence) for sequence in request.sequences)",
        caught_by="tests/unit/broker/recovery/test_restored.py::test_running_requests_go_on_and_are_shown",
    ),
    Mutant(
        name="kept-for-the-grace-alone",
        breaks="A request with `keep_s` is dropped after the shorter grace period.",
        target="swarm.broker.requests.completion:Completer.start_grace",
        old="grace_s = keep_s if on_purpose and keep_s else max(keep_s, self._settings.client_grace_s)",
        new="grace_s = self._settings.client_grace_s",
        caught_by="tests/unit/broker/requests/test_lookups.py::test_it_is_kept_for_as_long_as_was_asked_for",
    ),
    Mutant(
        name="sent-away-though-there-is-room",
        breaks="Running requests count as queued, so that requests are rejected although the queue has places.",
        target="swarm.broker.requests.admission:RequestAdmission._refuse_if_full",
        old="len(waiting) + len(self._state.awaiting_journal),",
        new="len(waiting) + len(self._state.awaiting_journal) + 2 * len(self._state.running) * self._quota.num_places,",
        caught_by="sim from 1",
    ),
    Mutant(
        name="pixels-stay-after-the-end",
        breaks="Without a journal, the pixels of ended requests stay in memory.",
        target="swarm.broker.requests.completion:Completer.end",
        old="if not self._settings.has_journal:",
        new="if False:",
        caught_by="tests/unit/broker/steps/test_images.py::test_pixels_take_memory_until_their_request_ends",
    ),
    Mutant(
        name="pixels-count-after-the-end",
        breaks="Pixels of ended requests count against the limit until the journal has the end.",
        target="swarm.broker.requests.admission:RequestAdmission._refuse_many_pixels",
        old="unended = (request for request in self._state.requests.values() if not request.has_ended)",
        new="unended = self._state.requests.values()",
        caught_by="tests/unit/broker/steps/test_images.py::test_pixels_take_memory_until_their_request_ends",
    ),
    Mutant(
        name="recalled-without-its-prompt",
        breaks="The answer to Recall contains the submitted request without its prompt.",
        target="swarm.broker.requests.lookups:RequestLookups.answer",
        old="self._out.append(SendToClient(client, RequestDetails(submit=_as_submitted(request.submit))))",
        new="""
            question = request.submit
            submit = Submit(request_id=question.request_id, prompt=(0,), params=question.params, seed=question.seed)
            self._out.append(SendToClient(client, RequestDetails(submit=submit)))
        """,
        caught_by="sim from 8",
    ),
    Mutant(
        name="acknowledged-before-the-sync",
        breaks="The broker reports a request as accepted before its journal entry is synced.",
        target="swarm.broker.requests.requests:RequestHandler._admit",
        old="self._out.append(WriteAcceptance(submit, tuple(s.id for s in request.sequences), request.tenant))",
        new="""
            self._out.append(WriteAcceptance(submit, tuple(s.id for s in request.sequences), request.tenant))
            self.on_accepted(request.id, tuple(s.id for s in request.sequences))
        """,
        caught_by="sim broker_power,broker_crash_at",
    ),
    Mutant(
        name="former-reader-not-told",
        breaks="A reader gets no message when another client replaces it.",
        target="swarm.broker.requests.requests:RequestHandler._set_reader",
        old="""
            if request.client not in (None, client):
                self._delivery.reject(request.client, request.id, SUPERSEDED)
        """,
        new="",
        caught_by="tests/unit/broker/requests/test_requests.py::test_one_reader_at_a_time",
    ),
    Mutant(
        name="failed-read-taken-for-unknown",
        breaks="A request that the journal cannot read at the moment is reported as unknown.",
        target="swarm.broker.requests.requests:RequestHandler._answer",
        old="refusal = unread if problem else self._absence_reason(message.request_id, account)",
        new="refusal = self._absence_reason(message.request_id, account)",
        caught_by="tests/unit/broker/requests/test_lookups.py::test_every_refusal_is_an_answer_to_the_question",
    ),
    Mutant(
        name="reader-takes-it-back",
        breaks="A client that only reconnects takes a request from its current reader.",
        target="swarm.broker.requests.requests:RequestHandler._attach",
        old="""
            elif attach.again and request.client not in (None, client):
                self._delivery.reject(client, request.id, SUPERSEDED)
        """,
        new="",
        caught_by="tests/unit/broker/requests/test_requests.py::test_one_reader_at_a_time",
    ),
    Mutant(
        name="attach-ignored-after-restart",
        breaks="Clients that reconnect to a restarted broker do not receive the tokens that they miss.",
        target="swarm.broker.requests.requests:RequestHandler._resume_reading",
        old="for sequence, index in zip(request.sequences, next_index, strict=True):",
        new="for sequence, index in zip(request.sequences if not request.restored else (), next_index):",
        caught_by="sim broker_crash from 29",
    ),
    Mutant(
        name="rewritten-counts-as-accepted-anew",
        breaks="A request that is written to a renewed journal is queued a second time.",
        target="swarm.broker.requests.requests:RequestHandler.on_accepted",
        old="""
            if request.accepted:
                return
        """,
        new="",
        caught_by="tests/unit/broker/journal/test_rewritten.py::test_nobody_is_told_anew_and_nothing_is_queued_twice",
    ),
    Mutant(
        name="former-reader-acknowledges",
        breaks="Acknowledgements of a former reader count for the current one.",
        target="swarm.broker.requests.requests:RequestHandler.ack",
        old="""
            self._state.count("late_acks")
            return
        """,
        new='self._state.count("late_acks")',
        caught_by="tests/unit/broker/requests/test_requests.py::test_one_reader_at_a_time",
    ),
    Mutant(
        name="another-tenants-request-attached",
        breaks="A client can attach to another tenant's request if it has the id.",
        target="swarm.broker.requests.requests:RequestHandler.attach",
        old="request = self._get_visible(attach.request_id, account)",
        new="request = self._state.requests.get(attach.request_id)",
        caught_by="tests/unit/broker/requests/test_accounts.py::test_another_tenants_request_is_as_an_unknown_one",
    ),
    Mutant(
        name="a-former-reader-cancels",
        breaks="A reader that leaves cancels the request although another client reads it now.",
        target="swarm.broker.requests.requests:RequestHandler.cancel",
        old="if cancel.if_reader and request.client not in (None, client):",
        new="if False:",
        caught_by="tests/unit/broker/requests/test_lookups.py::test_a_former_reader_that_leaves_cancels_nothing",
    ),
    Mutant(
        name="anybody-lets-go",
        breaks="A Detach from a client that is not the reader ends the reader's stream.",
        target="swarm.broker.requests.requests:RequestHandler.detach",
        old="elif request.client == client:",
        new="else:",
        caught_by="tests/unit/broker/recovery/test_restored.py::test_letting_go_of_somebody_elses",
    ),
    Mutant(
        name="a-look-up-takes-over",
        breaks="A client that only looks up a request becomes its reader.",
        target="swarm.broker.requests.requests:RequestHandler.look_up",
        old="if request is not None:",
        new="""
            if request is not None:
                self._set_reader(request, client)
        """,
        caught_by="sim from 8",
    ),
    Mutant(
        name="another-tenants-id-attached-by-submitting",
        breaks="Submitting an id that only the journal has returns another tenant's request.",
        target="swarm.broker.requests.requests:RequestHandler.on_request_read",
        old="if isinstance(message, Submit) and record is not None and not can_see(account, record.tenant):",
        new="if False:",
        caught_by="tests/unit/broker/requests/test_accounts.py::test_an_id_that_the_journal_has_of_another_tenant_is_taken",
    ),
    Mutant(
        name="answered-before-takes-it-away",
        breaks="The first client that reads an ended request takes it away from others that asked at the same time.",
        target="swarm.broker.requests.requests:RequestHandler.on_request_read",
        old="if record is not None and request_id not in self._state.requests:",
        new="if record is not None and client == waiting[0][0] and request_id not in self._state.requests:",
        caught_by="tests/unit/broker/recovery/test_restored.py::test_two_who_asked_at_the_same_time_both_read_it",
    ),
    Mutant(
        name="kept-taken-back-returns",
        breaks="A request that its client cancelled is read again from the journal.",
        target="swarm.broker.requests.requests:RequestHandler.on_request_read",
        old="if record is not None and was_withdrawn(record):",
        new="if record is not None and not waiting:",
        caught_by="tests/unit/broker/recovery/test_restored.py::test_submission_of_one_that_its_client_took_back",
    ),
    Mutant(
        name="stop-cuts-what-the-journal-lost",
        breaks="After a power cut, a stop string in lost tokens ends the answer at the end of the journal.",
        target="swarm.broker.requests.requests:RequestHandler.stop",
        old="if stop.at_index > sequence.num_generated:",
        new="if stop.at_index < 0:",
        caught_by="tests/unit/broker/requests/test_requests.py::test_stop_beyond_what_is_known_waits_for_it",
    ),
    Mutant(
        name="stop-string-ends-by-length",
        breaks="An answer that ends at a stop string has the finish reason `length`.",
        target="swarm.broker.requests.requests:RequestHandler.stop",
        old='self.completer.end(sequence, "stop", now)',
        new='self.completer.end(sequence, "length", now)',
        caught_by="sim",
    ),
    Mutant(
        name="slow-reader-taken-for-gone",
        breaks="A connected client that reads slowly is treated as disconnected.",
        target="swarm.broker.requests.requests:RequestHandler.on_client_blocked",
        old="request.is_blocked = True",
        new="self.completer.start_grace(request, self._state.now)",
        caught_by="tests/unit/broker/requests/test_requests.py::test_a_client_that_does_not_read_is_not_away",
    ),
    Mutant(
        name="end-before-the-journal",
        breaks="A client receives the end of its request before the end is in the journal.",
        target="swarm.broker.requests.tokens:TokenDelivery._end_is_due",
        old="return sequence.sent >= sequence.sampled and self.is_end_durable(sequence)",
        new="return sequence.sent >= sequence.sampled",
        caught_by="sim broker_crash",
    ),
    Mutant(
        name="logprobs-of-the-next-token",
        breaks="A token is sent with the log-probabilities of the next one.",
        target="swarm.broker.requests.tokens:TokenDelivery._next_tokens",
        old="logprobs=tuple(sequence.logprobs[start:end]) if wants_logprobs else (),",
        new="""
            logprobs=tuple(sequence.logprobs[start + 1 : end] + sequence.logprobs[end - 1 : end])
            if wants_logprobs
            else (),
        """,
        caught_by="sim",
    ),
    Mutant(
        name="way-of-another-token",
        breaks="The traces of tokens are sent in reverse order.",
        target="swarm.broker.requests.tokens:TokenDelivery._next_tokens",
        old="hops=tuple(sequence.hops[start:end]),",
        new="hops=tuple(sequence.hops[start:end][::-1]),",
        caught_by="sim from 1",
    ),
    Mutant(
        name="tokens-before-the-journal",
        breaks="Clients receive tokens that are not in the journal.",
        target="swarm.broker.requests.tokens:TokenDelivery.deliver",
        old="while sequence.sent < sequence.committed and sequence.sent - sequence.delivered < WINDOW:",
        new="while sequence.sent < sequence.collect and sequence.sent - sequence.delivered < WINDOW:",
        caught_by="sim client_drop",
        also=(
            Edit(
                target="swarm.broker.requests.tokens:TokenDelivery._next_tokens",
                old="stop = min(sequence.committed, sequence.sent + min(window_left, MAX_TOKENS_PER_MESSAGE))",
                new="stop = min(sequence.collect, sequence.sent + min(window_left, MAX_TOKENS_PER_MESSAGE))",
            ),
        ),
    ),
    Mutant(
        name="tokens-told-only-at-the-end",
        breaks="Clients receive no tokens before the request ends.",
        target="swarm.broker.requests.tokens:TokenDelivery.deliver",
        old="while sequence.sent < sequence.committed and sequence.sent - sequence.delivered < WINDOW:",
        new="""
            ended = sequence.state is SequenceState.ENDED
            while ended and sequence.sent < sequence.committed and sequence.sent - sequence.delivered < WINDOW:
        """,
        caught_by="sim crash",
    ),
    Mutant(
        name="second-token-without-a-guess",
        breaks="A last stage can add tokens that no proposal allows.",
        target="swarm.broker.requests.tokens:_may_follow",
        old="return proposal is not None and index < len(proposal.tokens) and proposal.tokens[index] == before[-1].token",
        new="return True",
        caught_by="tests/unit/broker/steps/test_proposals.py::test_a_second_token_without_guesses_is_dropped",
    ),
    Mutant(
        name="token-after-a-refusal",
        breaks="A last stage can add tokens after the first refused one.",
        target="swarm.broker.requests.tokens:_may_follow",
        old="return proposal is not None and index < len(proposal.tokens) and proposal.tokens[index] == before[-1].token",
        new="return proposal is not None",
        caught_by="tests/unit/broker/steps/test_proposals.py::test_tokens_beyond_the_verified_ones_are_dropped",
    ),
    Mutant(
        name="tokens-behind-the-end",
        breaks="An answer gets tokens behind its end if they were proposed.",
        target="swarm.broker.requests.tokens:TokenCollector.collect",
        old="""
            if sequence in ends:
                continue
        """,
        new="",
        caught_by="tests/unit/broker/steps/test_proposals.py::test_proposed_tokens_behind_the_end_are_dropped",
    ),
    Mutant(
        name="vector-of-a-part-of-the-prompt",
        breaks="A vector that was computed from a part of the prompt is the answer.",
        target="swarm.broker.requests.tokens:TokenCollector.collect_vectors",
        old="if not is_asked or item.position != sequence.sampled:",
        new="if not is_asked:",
        caught_by="tests/unit/broker/requests/test_vectors.py::test_what_is_no_vector_of_the_prompt_does_not_count",
    ),
    Mutant(
        name="token-before-its-prompts-logprobs",
        breaks="A request ends with a token that has come before the log probabilities of its prompt.",
        target="swarm.broker.requests.tokens:TokenCollector.collect",
        old="if sequence.lacks_prompt_logprobs:",
        new="if False:",
        caught_by="tests/unit/broker/requests/test_prompt_logprobs.py::test_results_of_steps_may_arrive_in_another_order",
    ),
)
