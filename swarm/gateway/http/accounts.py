"""Records the usage of each answer: for its key's limits, for the metrics, and for a trace if tracing is on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Protocol

from swarm.gateway.answer import Counts
from swarm.gateway.desk.desk import Owner
from swarm.numbers.http import HttpNumbers, Watch
from swarm.numbers.spans import Tracer

APIS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}


def api_of(path: str) -> str:
    """Return the API of a path; "other" for an unknown path."""
    return next((api for route, api in APIS.items() if path == route or path.startswith(route + "/")), "other")


class Ledger(Protocol):
    """Receives the token counts of each answer, however it ended. Must be quick, and must not raise."""

    def ended(self, owner: Owner, counts: Counts) -> None: ...


class Accounts:
    """Usage recorder of a gateway."""

    def __init__(self, numbers: HttpNumbers, ledger: Ledger | None = None, tracer: Tracer | None = None) -> None:
        self.numbers, self._ledger, self._tracer = numbers, ledger, tracer
        self._tasks: set[asyncio.Task[None]] = set()  # bounded by the tracer, which sends few at a time

    def open(
        self, owner: Owner, api: str, model: str, request_id: str, traceparent: str | None, *, traced: bool = True
    ) -> Account:
        """Start to record an answer. ``traced``: this is the request's first reader, so a trace is sent at its end."""
        return Account(self, self.numbers.began(api, model), owner, request_id, traceparent, traced=traced)

    def ended(self, account: Account, outcome: str, counts: Counts) -> None:
        """Record the end of an answer."""
        if self._ledger is not None:
            self._ledger.ended(account.owner, counts)
        if self._tracer is not None and account.traced:
            about: dict[str, str | int | float | bool] = {
                "swarm.outcome": outcome,
                "swarm.prompt_tokens": counts.prompt,
                "swarm.answer_tokens": counts.answer,
            }
            for request_id in account.request_ids:
                told = self._tracer.request_ended(request_id, account.traceparent, about)
                task = asyncio.ensure_future(told)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Wait for the traces in progress, and send them."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tracer is not None:
            await self._tracer.close()


class Account:
    """Usage of one answer."""

    __slots__ = ("_accounts", "_watch", "num_prompt", "owner", "request_ids", "tokens", "traced", "traceparent")

    def __init__(
        self,
        accounts: Accounts,
        watch: Watch,
        owner: Owner,
        request_id: str,
        traceparent: str | None,
        *,
        traced: bool,
    ) -> None:
        self._accounts, self._watch = accounts, watch
        self.tokens = watch.token  # called with the number of tokens that have come
        self.owner, self.traceparent = owner, traceparent
        self.request_ids: tuple[str, ...] = (request_id,)  # ids at the broker; several for several prompts
        self.traced = traced
        self.num_prompt = 0  # set as soon as it is known

    def close(self, outcome: str, counts: Counts) -> None:
        """Record the end of the answer. ``outcome``: "done", "failed", or "left" by its reader."""
        if not counts.prompt:  # it was left before its first token
            counts = replace(counts, prompt=self.num_prompt)
        self._watch.ended(outcome, counts.prompt, counts.cached, counts.answer)
        self._accounts.ended(self, outcome, counts)

    def refuse(self) -> None:
        """Drop the record of an answer that never began. The error handler counts it as refused."""
        self._watch.refused()
