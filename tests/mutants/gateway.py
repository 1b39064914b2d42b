"""Mutants of swarm/gateway."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="http-usage-chunk-without-choices",
        breaks="The stream's usage chunk has no `choices` list, which clients read.",
        target="swarm.gateway.apis.chat:ChatWriter.tail",
        old='body = {**self._base("chat.completion.chunk"), "choices": [], "usage": usage(counts)}',
        new='body = {**self._base("chat.completion.chunk"), "usage": usage(counts)}',
        caught_by="tests/unit/gateway/apis/test_chat_writer.py::test_the_usage_chunk_has_no_choices",
    ),
    Mutant(
        name="http-anybody-reads-a-kept-answer",
        breaks="A client with another API key can read a stored answer by its id.",
        target="swarm.gateway.desk.desk:Desk._recall",
        old="if memo is None or submit.tenant != owner.tenant:",
        new="if memo is None:",
        caught_by="tests/unit/gateway/test_desk.py::test_an_answer_is_read_on_by_its_owner_alone",
    ),
    Mutant(
        name="http-priority-cap-ignored",
        breaks="A request runs with a priority above its key's limit.",
        target="swarm.gateway.desk.desk:Desk.begin",
        old="priority=min(ask.priority, owner.max_priority),",
        new="priority=ask.priority,",
        caught_by="tests/unit/gateway/test_desk.py::test_a_priority_is_no_higher_than_its_owners",
    ),
    Mutant(
        name="http-cut-off-call-called-whole",
        breaks="An answer that was cut off inside a tool call has the finish reason for complete calls.",
        target="swarm.gateway.desk.parts:Parts._end",
        old='if choice.num_calls and reason == "stop":',
        new="if choice.num_calls:",
        caught_by="tests/unit/gateway/test_parts.py::test_an_answer_that_calls_ends_by_its_calls",
    ),
    Mutant(
        name="http-cut-off-called-stop",
        breaks="An answer that was cut off at its token limit has the finish reason `stop`.",
        target="swarm.gateway.desk.parts:Parts._end",
        old='reason: Reason = "length" if piece.finish_reason == "length" else "stop"',
        new='reason: Reason = "stop"',
        caught_by="tests/unit/gateway/test_parts.py::test_an_answer_ends_as_it_ended",
    ),
    Mutant(
        name="http-who-leaves-pays-nothing",
        breaks="The tokens of an answer are not charged to its key when the client disconnects.",
        target="swarm.gateway.http.accounts:Accounts.ended",
        old="if self._ledger is not None:",
        new='if self._ledger is not None and outcome == "done":',
        caught_by="tests/unit/gateway/test_counter.py::test_what_somebody_leaves_is_paid_as_far_as_it_came",
    ),
    Mutant(
        name="http-last-event-sent-again",
        breaks="A client that resumes a stream gets the last event that it has once more.",
        target="swarm.gateway.http.sse:Numbering.encode",
        old="if self._counts[choice] <= self._seen[choice]:",
        new="if self._counts[choice] < self._seen[choice]:",
        caught_by="tests/unit/gateway/test_streams.py::test_whoever_has_an_event_gets_those_behind_it",
    ),
    Mutant(
        name="http-escape-cut-in-two",
        breaks="The JSON scanner loses a backslash at the end of a chunk, so that the next quote ends the string.",
        target="swarm.gateway.scan:Scanner.feed",
        old=r'self._rest = b"\\" if num_backslashes % 2 else b""',
        new='self._rest = b""',
        caught_by="tests/unit/gateway/test_scan.py::test_no_value_is_missed_however_the_text_is_cut",
    ),
    Mutant(
        name="http-broken-off-called-whole",
        breaks="A proxied stream that breaks off ends without an error.",
        target="swarm.gateway.upstream.relay:Upstreams._events",
        old=r"""
            problem = Problem(503, f"the server {server.name} broke off its answer", code="upstream_failed")
            yield b"data: " + msgspec.json.encode(problem.openai()) + b"\n\n"
        """,
        new="",
        caught_by="tests/unit/gateway/test_relay.py::test_nobody_else_is_asked_once_bytes_were_sent",
    ),
    Mutant(
        name="http-two-answers-to-one-request",
        breaks="An error response follows the proxied server's response.",
        target="swarm.gateway.upstream.relay:Upstreams._ours_first",
        old="for message in () if is_answered else held:",
        new="for message in held:",
        caught_by="tests/unit/gateway/test_relay.py::test_there_is_one_answer",
    ),
    Mutant(
        name="http-clients-name-reaches-another-server",
        breaks="A request that is passed to another server keeps the client's name for the model.",
        target="swarm.gateway.upstream.relay:Upstreams._overflowed",
        old='targets = self.board.for_ours("" if served is None else served.name, trouble, time.monotonic())',
        new='targets = self.board.for_ours(str(fields.get("model")), trouble, time.monotonic())',
        caught_by="tests/unit/gateway/test_relay.py::test_no_name_that_a_client_wrote_reaches_a_server_that_it_is_not_meant_for",
    ),
)
