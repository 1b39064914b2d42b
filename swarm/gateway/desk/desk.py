"""Completion service: prepares and submits completion requests, and returns the parts of their answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from swarm.client.client import AsyncClient
from swarm.client.text.budget import size_of as size_as_text
from swarm.client.text.tokenizer import Rendering, TooSlow
from swarm.errors import ClientError, RequestTimeout, SwarmError, Unavailable
from swarm.gateway.answer import Counts, Part
from swarm.gateway.aside import Aside
from swarm.gateway.ask import Ask, Tool, ToolUse
from swarm.gateway.desk.parts import Parts
from swarm.gateway.desk.reading import Reading
from swarm.gateway.desk.served import Served
from swarm.gateway.errors import Problem, problem_of, wrong
from swarm.gateway.memo import Memo
from swarm.gateway.tools.chat import prepare
from swarm.params import SamplingParams
from swarm.wire.messages import Description, Submit

SHORT = 4096  # characters; longer prompts are tokenized in a thread
MEDIUM = 1 << 18  # characters; longer prompts take more than a fraction of a second, and have their own threads
MOMENT_S = 0.01  # seconds of processor time for a chat template on the loop
USABLE_S = 60.0  # seconds for which a description is good enough for requests
FRESH_S = 0.5  # seconds for which the broker's description counts as current
WARM_S = 0.8 * FRESH_S  # seconds between two refreshes
TURN = 256  # pieces of an answer that are processed before other tasks get their turn
ALL_LEFT = 0  # value of ``max_tokens``: as many as the model's context leaves


@dataclass(frozen=True, slots=True)
class Owner:
    """The caller on whose account a request runs."""

    tenant: str = "http"
    max_priority: int = 100
    is_admin: bool = False  # may administer the swarm


@dataclass(slots=True)
class Order:
    """A prepared request: its prompt as token ids."""

    ask: Ask
    ids: tuple[int, ...]
    params: SamplingParams
    served: Served


@dataclass(frozen=True, slots=True)
class Seen:
    """State of an answer at the time of a look-up."""

    memo: Memo
    parts: list[Part]
    counts: Counts
    has_ended: bool


class Desk:
    """Completion service of a gateway, on one client."""

    def __init__(self, client: AsyncClient, aliases: Sequence[str] = (), *, parse_special: bool = False) -> None:
        """Create the service. ``parse_special``: special tokens in messages become control tokens."""
        self.client = client
        self.bodies = Aside("bodies", 1)
        self._prompts, self._long_prompts = Aside("prompts", 2), Aside("long-prompts", 2)
        self._parse_special = parse_special
        self._aliases = tuple(aliases)
        self._served: Served | None = None  # the model that was served last
        self._described: Description | None = None  # the last description, None after a failure
        self._described_at = 0.0  # time of the last description, by the loop's clock
        self._asking: asyncio.Task[None] | None = None  # a refresh in the background

    @property
    def served_last(self) -> Served | None:
        """The model that was served last, even if it is not served now; None before the first."""
        return self._served

    async def description(self) -> Description:
        """Return the model and state of the swarm, at most ``FRESH_S`` old. Raises ApiError if the broker does not
        answer."""
        now = asyncio.get_running_loop().time()
        if self._described is None or now >= self._described_at + FRESH_S:
            return await self._ask()
        return self._described

    async def _ask(self) -> Description:
        now = asyncio.get_running_loop().time()
        try:
            described = await self.client.describe()
        except RequestTimeout as error:  # the request has no time limit of its own, so the broker is silent
            raise problem_of(Unavailable(str(error))) from None
        except ClientError as error:
            raise problem_of(error) from None
        self._described, self._described_at = described, now
        return described

    async def keep_warm(self) -> None:
        """Refresh the description before it gets too old, so that no request has to wait for it. Runs until
        cancelled."""
        while True:
            with contextlib.suppress(Problem):  # the next request gets the error
                await self._ask()
                await self.served()
            await asyncio.sleep(WARM_S)

    async def _about(self) -> Description:
        """Return a description that is good enough for requests. An older one of a serving swarm is used immediately
        and refreshed in the background, so that no first token waits for it; the broker checks in any case whether a
        request can be served."""
        now, known = asyncio.get_running_loop().time(), self._described
        if known is None or known.state != "serving" or now >= self._described_at + USABLE_S:
            return await self.description()
        if now >= self._described_at + FRESH_S and (self._asking is None or self._asking.done()):
            self._asking = asyncio.ensure_future(self._ask_anew())
        return known

    async def _ask_anew(self) -> None:
        try:
            await self.description()
        except Problem:
            self._described = None  # the next request waits for a description, or gets the error

    async def aclose(self) -> None:
        """Cancel background work and stop the threads. The client is closed by its owner."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        for threads in (self.bodies, self._prompts, self._long_prompts):
            threads.close()

    async def served(self) -> Served:
        """Return the model that is served now. Raises ApiError while there is none."""
        description = await self._about()
        try:
            text, words = await self.client.text_model(), await self.client.words()
        except SwarmError as error:
            raise problem_of(error) from None
        manifest = description.manifest
        if manifest is None:  # nothing to cache
            self._described = None
            raise Problem(503, f"the swarm waits for {description.waits_for}", code="unavailable", retry_after_s=2.0)
        served = self._served
        if served is None or served.manifest != manifest or served.text is not text:
            served = await asyncio.to_thread(Served.of, manifest, text, description.max_context, self._aliases)
            served.words, self._served = words, served
        served.max_context = description.max_context
        return served

    async def order(self, ask: Ask, served: Served) -> Order:
        """Prepare the prompt, in a thread if that takes longer than a moment. Raises ApiError."""
        try:
            ask, ids = await self._made(ask, served)
        except ClientError as error:
            raise problem_of(error) from None
        if len(ids) >= served.manifest.context:
            text = f"the prompt has {len(ids)} tokens; {served.name} holds {served.manifest.context}, "
            text += "and at least one must remain for the answer"
            raise Problem(400, text, param="prompt", code="context_length_exceeded")
        params = ask.params
        if params.max_tokens == ALL_LEFT:
            params = msgspec.structs.replace(params, max_tokens=served.room(len(ids)))
        return Order(ask, ids, params, served)

    async def _made(self, ask: Ask, served: Served) -> tuple[Ask, tuple[int, ...]]:
        size = size_of(ask, MEDIUM)
        how = Rendering(parse_special=self._parse_special)
        if size <= SHORT:
            try:
                return made(ask, served, replace(how, time_s=MOMENT_S))
            except TooSlow:  # this template is slow, and the next one may be, too: retry in a thread
                size = SHORT + 1
        return await self.threads_for(size).run(made, ask, served, how)

    def threads_for(self, size: int) -> Aside:
        """Return the threads for a prompt of about this many characters. Long prompts have their own, so that no others
        wait."""
        return self._prompts if size <= MEDIUM else self._long_prompts

    def begin(
        self,
        order: Order,
        owner: Owner,
        request_id: str | None,
        memo: Memo | None,
        *,
        detached: bool = False,
        told: Callable[[int], None] | None = None,
    ) -> Reading:
        """Start a request. Nothing is sent before the first part is read.

        ``detached``: it continues to its end without its reader; with ``keep_s``, for that long. ``on_tokens``: called
        with the number of tokens whenever some come.
        """
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
                keep_s=ask.keep_s,
                memo="" if memo is None else memo.text(),
                visible=order.served.marks if ask.tools.offered else (),
            )
        except ClientError as error:
            raise problem_of(error) from None
        parts = Parts(request_id or "", ask.tools, order.served.family, order.params.n)
        return Reading(stream, parts, num_prompt=len(order.ids), told=told)

    async def resume(self, request_id: str, owner: Owner) -> tuple[Memo, Reading]:
        """Read an existing answer from its beginning. It replaces another reader only when the first part is read."""
        submit, memo = await self._recall(request_id, owner)
        served = await self.served()
        stream = self.client.attach(request_id, visible=_shown(memo, served))
        parts = Parts(request_id, _offered(memo), served.family, submit.params.n)
        runs_on = submit.detached or submit.keep_s > 0
        return memo, Reading(stream, parts, num_prompt=memo.num_prompt, cancels=not runs_on)

    async def look_up(self, request_id: str, owner: Owner, may: Callable[[Memo], bool]) -> Seen:
        """Return what an answer has produced so far if ``is_allowed`` allows it, without replacing its reader. Raises
        ApiError.

        """
        submit, memo = await self._recall(request_id, owner)
        if not may(memo):
            raise Problem(404, f"the answer {request_id!r} was not stored: request it with store", code="not_found")
        served = await self.served()
        try:
            progress = await self.client.look_up(request_id, visible=_shown(memo, served))
        except ClientError as error:
            raise problem_of(error) from None
        reader = Parts(request_id, _offered(memo), served.family, submit.params.n)
        parts: list[Part] = []
        for number, piece in enumerate(progress.pieces):
            parts += reader.take(piece)
            if number % TURN == TURN - 1:
                await asyncio.sleep(0)
        if progress.completion is None:
            num_tokens = sum(piece.token is not None for piece in progress.pieces)
            return Seen(memo, parts, Counts(memo.num_prompt, num_tokens), has_ended=False)
        usage = progress.completion.usage
        return Seen(memo, parts, Counts(usage.num_prompt, usage.num_tokens, usage.num_cached), has_ended=True)

    async def _recall(self, request_id: str, owner: Owner) -> tuple[Submit, Memo]:
        """Return a request's submission and its resume state. Raises ApiError; for any caller but its owner, the
        request does not exist."""
        try:
            submit = await self.client.recall(request_id)
        except ClientError as error:
            raise problem_of(error) from None
        memo = Memo.read(submit.memo)
        if memo is None or submit.tenant != owner.tenant:
            raise Problem(404, f"there is no answer {request_id!r} that can be resumed", code="not_found")
        return submit, memo


def _shown(memo: Memo, served: Served) -> tuple[int, ...]:
    """Return the special tokens whose text the tool-call parser needs."""
    return served.marks if memo.tools else ()


def _offered(memo: Memo) -> ToolUse:
    tools = tuple(Tool(tool.name, custom=tool.custom) for tool in memo.tools)
    return ToolUse(tools, parallel=memo.parallel)


def size_of(ask: Ask, most: int) -> int:
    """Return the approximate length of a prompt: in characters, or in tokens where those were given. Counting stops at
    ``most``."""
    if ask.messages is None:
        return len(ask.prompt)
    tools = ask.tools.tools if ask.tools.offered else ()
    return size_as_text([ask.messages, [(tool.description, tool.parameters) for tool in tools]], most)


def made(ask: Ask, served: Served, how: Rendering) -> tuple[Ask, tuple[int, ...]]:
    """Return the request with the grammar that its tools need, and its prompt's tokens."""
    ask = with_grammar(ask, served)
    return ask, encode(ask, served, how)


def with_grammar(ask: Ask, served: Served) -> Ask:
    """Add the grammar that forces a call, if the model must call a tool."""
    if ask.tools.choice not in ("required", "named"):
        return ask
    return replace(ask, params=msgspec.structs.replace(ask.params, grammar=served.family.forced(ask.tools)))


def encode(ask: Ask, served: Served, how: Rendering) -> tuple[int, ...]:
    """Return the prompt's tokens. Raises InvalidRequest, or ApiError if the model has no tokenizer."""
    if ask.messages is not None:
        text = served.needs_text("pass token ids to /v1/completions")
        if clash := ask.template.keys() & {"self", "messages", "tools"}:
            raise wrong("chat_template_kwargs", f"{min(clash)} has a field of its own")
        ready = prepare(ask.messages, ask.tools, served.family, served.habits)
        variables = {**ask.template, **ready.variables}
        return text.encode_chat(ready.messages, variables, most=served.manifest.context, how=how)
    if isinstance(ask.prompt, tuple):
        return ask.prompt
    return served.needs_text("pass token ids").encode(ask.prompt, most=served.manifest.context)
