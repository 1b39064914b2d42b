"""Mutants of swarm/client."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="frozen-broker-ends-its-requests",
        breaks="An accepted request waits for a frozen broker no longer than an unanswered one.",
        target="swarm.client.contact:Contact._patience_s",
        old="return self.reconnect_timeout_s if is_answered else min(self.reconnect_timeout_s, UNANSWERED_S)",
        new="return min(self.reconnect_timeout_s, UNANSWERED_S)",
        caught_by="tests/unit/client/test_session.py::test_an_answered_request_outlasts_a_frozen_broker",
    ),
    Mutant(
        name="session-takes-its-question-for-an-answer",
        breaks="The client's own health check counts as a message from the broker.",
        target="swarm.client.contact:Contact.probes",
        old="self._probed_at = now",
        new="self._probed_at = self._heard_at = now",
        caught_by="tests/unit/client/test_session.py::test_a_silent_broker",
    ),
    Mutant(
        name="lock-kept-though-it-is-not",
        breaks="A member confirms the broker's new key although it could not store it.",
        target="swarm.client.link:Link._broker_moves",
        old="except ConfigError:",
        new="""
            except ConfigError:
                self._channel.send(CLIENT.encode(BrokerKeyKept(key=key)))
        """,
        caught_by="tests/unit/client/test_link.py::test_what_cant_be_kept_is_not_said_to_be",
    ),
    Mutant(
        name="lock-key-in-place-before-it-is-known",
        breaks="A member replaces its own key before the broker has confirmed the new one.",
        target="swarm.client.link:Link._change_key",
        old="secret = home.announced()",
        new="""
            secret = home.announced()
            home.takes_place(secret)
        """,
        caught_by="tests/unit/client/test_link.py::test_who_is_told_to_change_its_key_does",
    ),
    Mutant(
        name="session-cancels-once",
        breaks="The client does not repeat a Cancel that was lost with its connection.",
        target="swarm.client.ongoing:Conversation.tell_again",
        old="""
            if request.left:
                return [Send(request.cancel())]
            if request.ended:
        """,
        new="if request.left or request.ended:",
        caught_by="tests/unit/client/test_session.py::test_leaving_while_the_connection_is_gone",
    ),
    Mutant(
        name="session-forgets-its-stops",
        breaks="The client does not repeat where a stop string was found after a reconnect.",
        target="swarm.client.ongoing:Conversation.tell_again",
        old="return self.attach(request, now) + self.say(request.stops())",
        new="return self.attach(request, now)",
        caught_by="tests/unit/client/test_session.py::test_a_reconnect_goes_on_where_it_was",
    ),
    Mutant(
        name="session-attaches-from-the-start-of-a-gap",
        breaks="A reconnecting client asks to continue one token too late.",
        target="swarm.client.ongoing:Ongoing.attach",
        old="next_index = tuple(c.expected for c in self.continuations)",
        new="next_index = tuple(c.expected + 1 for c in self.continuations)",
        caught_by="sim broker_crash,client_drop",
    ),
    Mutant(
        name="attached-cancelled-by-its-reader",
        breaks="A reader that detaches from another process's request cancels it.",
        target="swarm.client.ongoing:Ongoing.outlives_caller",
        old="return self.submit.detached or self.attached or self.submit.keep_s > 0",
        new="return self.submit.detached or self.submit.keep_s > 0",
        caught_by="tests/unit/client/test_attached.py::test_an_attached_request_is_read_and_let_go_of",
    ),
    Mutant(
        name="session-acknowledges-unread",
        breaks="The client acknowledges a token when it arrives instead of when it is read.",
        target="swarm.client.ongoing:Ongoing.take",
        old="continuation.expected += len(taken)",
        new="""
            continuation.expected += len(taken)
            continuation.consumed = continuation.expected
        """,
        caught_by="tests/unit/client/test_session.py::test_acknowledgements_follow_the_consumer",
    ),
    Mutant(
        name="questions-of-a-kind-at-once",
        breaks="The client sends questions whose answers it cannot tell apart at the same time.",
        target="swarm.client.questions:Questions.due",
        old="if not question.is_said and question.line not in lines:",
        new="if not question.is_said:",
        caught_by="tests/unit/client/test_session.py::test_questions_of_one_kind_are_asked_one_after_the_other",
    ),
    Mutant(
        name="session-forgets-its-questions",
        breaks="The client does not repeat its questions after a reconnect.",
        target="swarm.client.session:Session._connected",
        old="return actions + self._talk.say(self._questions.connect()) + self._ask_on()",
        new="return actions",
        caught_by="tests/unit/client/test_session.py::test_nothing_is_sent_without_a_connection",
    ),
    Mutant(
        name="told-again-to-a-frozen-broker",
        breaks="The client repeats requests to a frozen broker, which answers each one later.",
        target="swarm.client.session:Session._nudges",
        old="for request in () if self._contact.is_silent(now) else self._requests.values():",
        new="for request in self._requests.values():",
        caught_by="tests/unit/client/test_session.py::test_an_answered_request_outlasts_a_frozen_broker",
    ),
)
