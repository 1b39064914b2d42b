"""Answers to questions about requests: the submission, and the tokens so far.

A question changes nothing: the request keeps its reader, the reader its position and window, and a request without a
reader its remaining time. This module only reads the state, and sends each answer to the client that asked. A refusal
is an answer to the question and never a ``Rejected`` message, which would end a reader's request.
"""

from __future__ import annotations

import msgspec

from swarm.broker.actions import Outbox, SendToClient
from swarm.broker.requests.tokens import TokenDelivery, build_finished
from swarm.broker.state import Request, Sequence, SequenceState
from swarm.broker.state.adapters import with_plain_name
from swarm.broker.state.ended_requests import HOP_WEIGHT, LOGPROB_WEIGHT, RequestQuestion, RequestRefusal
from swarm.wire.messages import GetRequest, Json, LookUp, Report, RequestDetails, Submit, TokensSnapshot

# token weight of one answer (as in ``state.ended_requests``): a few hundred kilobytes on the wire
PAGE_WEIGHT = 1 << 15


class RequestLookups:
    """Answers questions about requests in memory. Methods append messages to ``out``."""

    def __init__(self, out: Outbox, delivery: TokenDelivery) -> None:
        self._out = out
        self._delivery = delivery

    def answer(self, client: bytes, question: RequestQuestion, request: Request) -> None:
        """Send the answer."""
        if isinstance(question, GetRequest):
            self._out.append(SendToClient(client, RequestDetails(submit=_as_submitted(request.submit))))
        elif question.index >= len(request.sequences):
            reason = f"the request has {len(request.sequences)} continuations, there is no number {question.index}"
            self.refuse(client, question, RequestRefusal("invalid", reason))
        else:
            self._out.append(SendToClient(client, self._build_snapshot(question, request.sequences[question.index])))

    def refuse(self, client: bytes, question: RequestQuestion, refusal: RequestRefusal) -> None:
        """Send the reason why there is no answer, and when to ask again."""
        body: Json = {"request_id": question.request_id, "error": refusal.reason, "code": refusal.code}
        if refusal.retry_after_s is not None:
            body["retry_after_s"] = refusal.retry_after_s
        if isinstance(question, LookUp):
            body["question"] = question.question
        what = "recall" if isinstance(question, GetRequest) else "look_up"
        self._out.append(SendToClient(client, Report(what=what, ok=False, body=body)))

    def _build_snapshot(self, question: LookUp, sequence: Sequence) -> TokensSnapshot:
        """Return a page of the committed tokens; only these may be seen by clients."""
        submit = sequence.request.submit
        num_tokens = sequence.committed - sequence.num_prompt
        start = min(question.start, num_tokens)
        stop = min(num_tokens, start + _page_size(submit, sequence))
        has_ended = sequence.state is SequenceState.ENDED and self._delivery.is_end_durable(sequence)
        return TokensSnapshot(
            question=question.question,
            request_id=submit.request_id,
            index=sequence.index,
            start=start,
            ids=tuple(sequence.tokens[sequence.num_prompt + start : sequence.num_prompt + stop]),
            num_tokens=num_tokens,
            logprobs=tuple(sequence.logprobs[start:stop]) if submit.params.logprobs is not None else (),
            hops=tuple(sequence.hops[start:stop]),
            finished=build_finished(sequence) if has_ended and stop == sequence.num_generated else None,
            submit=_as_submitted(submit) if (question.index, question.start) == (0, 0) else None,
        )


def _as_submitted(submit: Submit) -> Submit:
    """Return the submission as clients get it back: with the adapter's name, without pixels."""
    plain = with_plain_name(submit)
    return msgspec.structs.replace(plain, pixels=()) if plain.pixels else plain


def _page_size(submit: Submit, sequence: Sequence) -> int:
    """Return the number of tokens that fit into one answer message, at least one."""
    num_logprobs = submit.params.logprobs
    weight = 1 + (0 if num_logprobs is None else LOGPROB_WEIGHT * (1 + num_logprobs))
    weight += HOP_WEIGHT * max(map(len, sequence.hops), default=0)
    return max(1, PAGE_WEIGHT // weight)
