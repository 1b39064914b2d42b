"""The desk: takes asks to the swarm, and gives the parts of the answers as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from swarm.client.client import AsyncClient
from swarm.errors import ClientError
from swarm.gateway.ask import Ask, Tool, ToolUse
from swarm.gateway.desk.parts import Parts
from swarm.gateway.desk.prompts import encode
from swarm.gateway.desk.reading import Reading
from swarm.gateway.desk.served import Served
from swarm.gateway.errors import Problem, problem_of
from swarm.gateway.memo import Memo
from swarm.gateway.tools.families import family_of
from swarm.params import SamplingParams
from swarm.wire.messages import Description

SHORT = 4096  # characters of a prompt that are tokenized at once; longer ones beside the loop
FRESH_S = 0.5  # for which what the broker said of itself is believed
ALL_LEFT = 0  # as ``max_tokens``: as many as the model's context leaves


@dataclass(frozen=True, slots=True)
class Owner:
    """On whose account a request runs."""

    tenant: str = "http"
    max_priority: int = 100


@dataclass(slots=True)
class Order:
    """An ask that is ready: its prompt as token ids."""

    ask: Ask
    ids: tuple[int, ...]
    params: SamplingParams
    served: Served


class Desk:
    """One for a gateway; on one client."""

    def __init__(self, client: AsyncClient, aliases: Sequence[str] = ()) -> None:
        self.client = client
        self._aliases = tuple(aliases)
        self._served: Served | None = None
        self._described: Description | None = None
        self._described_at = 0.0

    async def description(self) -> Description:
        """The model and the state of the swarm, at most a moment old. Raises Problem if the broker doesn't answer."""
        now = asyncio.get_running_loop().time()
        if self._described is None or now >= self._described_at + FRESH_S:
            try:
                self._described = await self.client.describe()
            except ClientError as error:
                raise problem_of(error) from None
            self._described_at = now
        return self._described

    async def served(self) -> Served:
        """The model that is served now. Raises Problem while there is none."""
        description = await self.description()
        try:
            text = await self.client.text_model()
        except ClientError as error:
            raise problem_of(error) from None
        manifest = description.manifest
        if manifest is None:  # nothing to be cached
            self._described = None
            raise Problem(503, f"the swarm waits for {description.waits_for}", code="unavailable", retry_after_s=2.0)
        served = self._served
        if served is None or served.manifest != manifest or served.text is not text:
            template = ""
            served = Served(manifest, text, description.max_context, family_of(template), self._aliases)
            self._served = served
        served.max_context = description.max_context
        return served

    async def order(self, ask: Ask, served: Served) -> Order:
        """Make the prompt. Long ones are tokenized in a thread."""
        ask = with_grammar(ask, served)
        long = len(ask.prompt) if ask.messages is None else sum(len(str(message)) for message in ask.messages)
        try:
            ids = await asyncio.to_thread(encode, ask, served) if long > SHORT else encode(ask, served)
        except ClientError as error:
            raise problem_of(error) from None
        params = ask.params
        if params.max_tokens == ALL_LEFT:
            params = msgspec.structs.replace(params, max_tokens=served.room(len(ids)))
        return Order(ask, ids, params, served)

    def begin(
        self, order: Order, owner: Owner, request_id: str | None, memo: Memo | None, *, detached: bool = False
    ) -> Reading:
        """Hand it in. Nothing is sent before the first part is asked for."""
        ask = order.ask
        if memo is not None:
            memo = msgspec.structs.replace(memo, num_prompt=len(order.ids))
        try:
            stream = self.client.stream(
                order.ids,
                order.params,
                request_id=request_id,
                tenant=owner.tenant,
                priority=min(ask.priority, owner.max_priority),
                deadline_s=ask.deadline_s,
                timeout=ask.timeout_s,
                hops=ask.hops,
                detached=detached,
                memo="" if memo is None else memo.text(),
            )
        except ClientError as error:
            raise problem_of(error) from None
        return Reading(stream, Parts(request_id or "", ask.tools, order.served.family, order.params.n), len(order.ids))

    async def resume(self, request_id: str, owner: Owner) -> tuple[Memo, Reading]:
        """Read an answer that was asked for before, from its beginning."""
        try:
            submit = await self.client.recall(request_id)
        except ClientError as error:
            raise problem_of(error) from None
        memo = Memo.read(submit.memo)
        if memo is None or submit.tenant != owner.tenant:
            raise Problem(404, f"nobody knows an answer {request_id!r} that can be read on", code="not_found")
        served = await self.served()
        tools = tuple(Tool(tool.name, custom=tool.custom) for tool in memo.tools)
        use = ToolUse(tools, parallel=memo.parallel)
        stream = self.client.attach(request_id)
        return memo, Reading(stream, Parts(request_id, use, served.family, submit.params.n), memo.num_prompt)


def with_grammar(ask: Ask, served: Served) -> Ask:
    """Make the model call, where it must."""
    if ask.tools.choice not in ("required", "named"):
        return ask
    return replace(ask, params=msgspec.structs.replace(ask.params, grammar=served.family.forced(ask.tools)))
