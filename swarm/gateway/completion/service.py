"""Completion service: prepares and submits completion requests, and returns the parts of their answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from swarm.api_keys.keys import KEYLESS_TENANT
from swarm.client.client import AsyncClient
from swarm.client.text.budget import size_of as size_as_text
from swarm.client.text.tokenizer import ChatRendering, TemplateTooSlow
from swarm.errors import ClientError, PromptTooLong, RequestTimeout, SwarmError, Unavailable
from swarm.gateway.answer import AnswerPart, TokenCounts
from swarm.gateway.completion.answer_stream import AnswerStream
from swarm.gateway.completion.assembler import AnswerAssembler
from swarm.gateway.completion.served_model import API_DEFAULTS, RequestDefaults, ServedModel
from swarm.gateway.completion_request import CompletionRequest, Tool, ToolOptions
from swarm.gateway.errors import ApiError, ContextOverflow, invalid_field, to_api_error
from swarm.gateway.images import DEFAULT_RULES, ImageRules, PreparedImage, have_images, place_images, take_images
from swarm.gateway.reasoning.format import ReasoningStart
from swarm.gateway.resume_state import ResumeState
from swarm.gateway.thread_pool import BoundedThreadPool
from swarm.gateway.tool_calls.template_adapter import adapt_conversation, check_continued
from swarm.params import SamplingParams, Thinking
from swarm.wire.messages import Description, Submit

SHORT_PROMPT = 4096  # characters; longer prompts are tokenized in a thread
MEDIUM_PROMPT = 1 << 18  # characters; longer prompts take more than a fraction of a second, and have their own threads
INLINE_TEMPLATE_S = 0.01  # seconds of processor time for a chat template on the loop
# Requests with images that wait to be decoded; one at a time is, since an image can take half a gigabyte.
MAX_IMAGE_TASKS = 32
USABLE_S = 60.0  # seconds for which a description is good enough for requests
FRESH_S = 0.5  # seconds for which the broker's description counts as current
SILENT_S = 5.0  # seconds without a description after which the broker counts as unreachable
UNREACHABLE = "unreachable"
REFRESH_S = 0.8 * FRESH_S  # seconds between two refreshes
YIELD_EVERY = 256  # pieces of an answer that are processed before other tasks get their turn
MAX_PROGRESS_QUERIES = 8  # at a time; each stream that waits for a long prompt asks once a second
PROGRESS_TIMEOUT_S = 0.5  # seconds that a comment may wait for the broker
REST_OF_CONTEXT = 0  # value of ``max_tokens``: as many as the model's context leaves


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller on whose account a request runs."""

    tenant: str = KEYLESS_TENANT
    max_priority: int = 100
    is_admin: bool = False  # may administer the swarm
    models: frozenset[str] = frozenset()  # the only models that it may use; empty: all
    owner: str = KEYLESS_TENANT  # id of its key, which a later key of the same name does not have

    def may_use(self, model: str) -> bool:
        return not self.models or model in self.models


@dataclass(slots=True)
class PreparedRequest:
    """A prepared request: its prompt as token ids."""

    request: CompletionRequest
    ids: tuple[int, ...]
    params: SamplingParams
    served: ServedModel
    reasoning: ReasoningStart = "none"  # how the answer begins

    def set_default_seed(self, seed: int) -> None:
        """Set the seed if the request gives none."""
        if self.params.seed is None:
            self.params = msgspec.structs.replace(self.params, seed=seed)


@dataclass(frozen=True, slots=True)
class AnswerSnapshot:
    """State of an answer at the time of a look-up."""

    memo: ResumeState
    parts: list[AnswerPart]
    counts: TokenCounts
    has_ended: bool


class CompletionService:
    """Completion service of a gateway, on one client."""

    def __init__(
        self,
        client: AsyncClient,
        aliases: Sequence[str] = (),
        *,
        parse_special: bool = False,
        ignore_unknown_fields: bool = False,
        defaults: RequestDefaults = API_DEFAULTS,
        images: ImageRules = DEFAULT_RULES,
    ) -> None:
        """Create the service. ``parse_special``: special tokens in messages become control tokens.
        ``ignore_unknown_fields``: bodies may have unknown fields. ``defaults``: for requests that give no value.
        ``images``: limits of images."""
        self.client = client
        self.body_threads = BoundedThreadPool("bodies", 1)
        self._prompt_threads, self._long_prompt_threads = (
            BoundedThreadPool("prompts", 2),
            BoundedThreadPool("long-prompts", 2),
        )
        self._image_threads = BoundedThreadPool("images", 1, MAX_IMAGE_TASKS)
        self._parse_special = parse_special
        self._aliases = tuple(aliases)
        self._ignore_unknown_fields = ignore_unknown_fields
        self._defaults, self._images = defaults, images
        self._looking = asyncio.Lock()
        self._served: ServedModel | None = None  # the model that was served last
        self._description: Description | None = None  # the last description, None after a failure
        self._described_at = 0.0  # time of the last description, by the loop's clock
        self._refreshing: asyncio.Task[None] | None = None  # a refresh in the background
        self._num_progress_queries = 0  # queries for the progress of prompts that wait for the broker

    @property
    def last_served_model(self) -> ServedModel | None:
        """The model that was served last, even if it is not served now; None before the first."""
        return self._served

    @property
    def state(self) -> str:
        """The swarm's state, or ``UNREACHABLE`` if its broker has not answered for a while."""
        age_s = asyncio.get_running_loop().time() - self._described_at
        return UNREACHABLE if self._description is None or age_s > SILENT_S else self._description.state

    async def description(self) -> Description:
        """Return the model and state of the swarm, at most ``FRESH_S`` old. Raises ApiError if the broker does not
        answer."""
        now = asyncio.get_running_loop().time()
        if self._description is None or now >= self._described_at + FRESH_S:
            return await self._refresh()
        return self._description

    async def _refresh(self) -> Description:
        now = asyncio.get_running_loop().time()
        try:
            described = await self.client.describe()
        except RequestTimeout as error:  # the request has no time limit of its own, so the broker is silent
            raise to_api_error(Unavailable(str(error))) from None
        except ClientError as error:
            raise to_api_error(error) from None
        self._description, self._described_at = described, now
        return described

    async def look_again(self) -> None:
        """Bring the served model up to date, whatever its description's age. Callers share a description that was
        asked for after their calls. Raises ApiError."""
        now = asyncio.get_running_loop().time()
        async with self._looking:
            if self._described_at <= now:
                await self._refresh()
        await self.served_model()

    async def keep_warm(self) -> None:
        """Refresh the description before it gets too old, so that no request has to wait for it. Runs until
        cancelled."""
        while True:
            with contextlib.suppress(ApiError):  # the next request gets the error
                await self._refresh()
                await self.served_model()
            await asyncio.sleep(REFRESH_S)

    async def _usable_description(self) -> Description:
        """Return a description that is good enough for requests. An older one of a serving swarm is used immediately
        and refreshed in the background, so that no first token waits for it; the broker checks in any case whether a
        request can be served."""
        now, latest = asyncio.get_running_loop().time(), self._description
        if latest is None or latest.state != "serving" or now >= self._described_at + USABLE_S:
            return await self.description()
        if now >= self._described_at + FRESH_S and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = asyncio.ensure_future(self._refresh_in_background())
        return latest

    async def _refresh_in_background(self) -> None:
        try:
            await self.description()
        except ApiError:
            self._description = None  # the next request waits for a description, or gets the error

    async def aclose(self) -> None:
        """Cancel background work and stop the threads. The client is closed by its owner."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        for threads in (self.body_threads, self._prompt_threads, self._long_prompt_threads, self._image_threads):
            threads.close()

    async def served_model(self) -> ServedModel:
        """Return the model that is served now. Raises ApiError while there is none."""
        description = await self._usable_description()
        try:
            text, words = await self.client.text_model(), await self.client.words()
        except SwarmError as error:
            raise to_api_error(error) from None
        manifest = description.manifest
        if manifest is None:  # nothing to cache
            self._description = None
            raise ApiError(503, f"the swarm waits for {description.waits_for}", code="unavailable", retry_after_s=2.0)
        served = self._served
        if served is None or served.manifest != manifest or served.text is not text:
            served = await asyncio.to_thread(ServedModel.create, manifest, text, description.max_context, self._aliases)
            served.vocabulary, self._served = words, served
            served.ignores_unknown_fields, served.defaults = self._ignore_unknown_fields, self._defaults
            served.images = self._images
        served.max_context = description.max_context
        return served

    async def prepare(self, request: CompletionRequest, served: ServedModel) -> PreparedRequest:
        """Prepare the prompt, in a thread if that takes longer than a moment. Raises ApiError."""
        try:
            request, ids, start = await self._encode_prompt(request, served)
        except PromptTooLong as error:
            raise ContextOverflow(error.least_tokens, served.manifest.context, is_least=True) from None
        except ClientError as error:
            raise to_api_error(error) from None
        if len(ids) + (request.rest_limit != 0) > served.manifest.context:
            raise ContextOverflow(len(ids), served.manifest.context)
        params = served.adapted(request.params)
        if params.max_tokens == REST_OF_CONTEXT:
            rest = served.max_answer_tokens(len(ids))
            if request.rest_limit is not None:  # a default, so it gives way to the request's own minimum
                rest = min(rest, max(request.rest_limit, params.min_tokens))
            params = msgspec.structs.replace(params, max_tokens=rest)
        return PreparedRequest(request, ids, params, served, start)

    async def _encode_prompt(
        self, request: CompletionRequest, served: ServedModel
    ) -> tuple[CompletionRequest, tuple[int, ...], ReasoningStart]:
        images: tuple[PreparedImage, ...] = ()
        if have_images(request.messages):
            field = request.client_name_of("prompt")
            messages, images = await self._image_threads.run(take_images, request.messages or (), served, field)
            request = replace(request, messages=messages)
        size = prompt_size(request, MEDIUM_PROMPT)
        how = ChatRendering(parse_special=self._parse_special, continues=request.continues)
        if size <= SHORT_PROMPT and not images:
            try:
                return prepare_prompt(request, served, replace(how, time_s=INLINE_TEMPLATE_S))
            except TemplateTooSlow:  # this template is slow, and the next one may be, too: retry in a thread
                size = SHORT_PROMPT + 1
        return await self.threads_for(size).run(prepare_prompt, request, served, how, images)

    def threads_for(self, size: int) -> BoundedThreadPool:
        """Return the threads for a prompt of about this many characters. Long prompts have their own, so that no others
        wait."""
        return self._prompt_threads if size <= MEDIUM_PROMPT else self._long_prompt_threads

    def begin(
        self,
        prepared: PreparedRequest,
        caller: Caller,
        request_id: str | None,
        memo: ResumeState | None,
        *,
        detached: bool = False,
        on_tokens: Callable[[int], None] | None = None,
    ) -> AnswerStream:
        """Start a request. Nothing is sent before the first part is read.

        ``detached``: it continues to its end if this gateway ends, and closing its answer cancels it. ``on_tokens``:
        called with the number of tokens whenever some come.
        """
        request = prepared.request
        if memo is not None:
            memo = msgspec.structs.replace(
                memo, num_prompt=len(prepared.ids), reasoning=prepared.reasoning, adapter=prepared.served.adapter
            )
        try:
            stream = self.client.stream(
                prepared.ids,
                prepared.params,
                request_id=request_id,
                tenant=caller.tenant,
                priority=min(request.priority, caller.max_priority),
                deadline_s=request.deadline_s,
                timeout=request.timeout_s,
                hops=request.hops,
                detached=detached,
                keep_s=request.keep_s,
                speculation=request.speculation,
                memo="" if memo is None else memo.encode(),
                pixels=request.pixels,
                visible=_visible_tokens(
                    prepared.served, request.tools, prepared.reasoning, show_special=request.show_special
                ),
            )
        except ClientError as error:
            raise to_api_error(error) from None
        parts = _make_assembler(request_id or "", request.tools, prepared.reasoning, prepared.served, prepared.params.n)
        num_prompt = len(prepared.ids)
        return AnswerStream(
            stream, parts, num_prompt=num_prompt, prompt=prepared.ids, cancels=detached, on_tokens=on_tokens
        )

    async def prompt_progress(self, request_id: str) -> tuple[int, int] | None:
        """Return how many tokens of a request's prompt every stage has computed, and how many there are; None if the
        broker does not answer at once, or if many streams ask."""
        if self._num_progress_queries >= MAX_PROGRESS_QUERIES:
            return None
        self._num_progress_queries += 1
        try:
            async with asyncio.timeout(PROGRESS_TIMEOUT_S):
                report = await self.client.query("requests", request_id=request_id)
        except (ClientError, TimeoutError):
            return None
        finally:
            self._num_progress_queries -= 1
        rows: Any = report.get("requests") or ()
        return next(((row["num_prompt_computed"], row["num_prompt"]) for row in rows), None)

    async def resume(self, request_id: str, caller: Caller) -> tuple[ResumeState, AnswerStream]:
        """Read an existing answer from its beginning. It replaces another reader only when the first part is read."""
        submit, memo = await self.recall(request_id, caller)
        served = await self.served_model()
        stream = self.client.attach(request_id, visible=_recalled_tokens(memo, served))
        parts = _make_assembler(request_id, _offered_tools(memo), memo.reasoning, served, submit.params.n)
        runs_on = submit.detached or submit.keep_s > 0
        return memo, AnswerStream(stream, parts, num_prompt=memo.num_prompt, cancels=not runs_on)

    async def look_up(
        self, request_id: str, caller: Caller, is_allowed: Callable[[ResumeState], bool]
    ) -> AnswerSnapshot:
        """Return what an answer has produced so far if ``is_allowed`` allows it, without replacing its reader. Raises
        ApiError.

        """
        submit, memo = await self.recall(request_id, caller)
        if not is_allowed(memo):
            raise ApiError(404, f"the answer {request_id!r} was requested with store: false", code="not_found")
        served = await self.served_model()
        try:
            progress = await self.client.look_up(request_id, visible=_recalled_tokens(memo, served))
        except ClientError as error:
            raise to_api_error(error) from None
        assembler = _make_assembler(request_id, _offered_tools(memo), memo.reasoning, served, submit.params.n)
        parts: list[AnswerPart] = []
        for number, piece in enumerate(progress.pieces):
            parts += assembler.add(piece)
            if number % YIELD_EVERY == YIELD_EVERY - 1:
                await asyncio.sleep(0)
        if progress.completion is None:
            num_tokens = sum(piece.token is not None for piece in progress.pieces)
            counts = TokenCounts(memo.num_prompt, num_tokens, reasoning=assembler.num_reasoning)
            return AnswerSnapshot(memo, parts, counts, has_ended=False)
        usage = progress.completion.usage
        counts = TokenCounts(usage.num_prompt, usage.num_tokens, usage.num_cached, assembler.num_reasoning)
        return AnswerSnapshot(memo, parts, counts, has_ended=True)

    async def recall(self, request_id: str, caller: Caller) -> tuple[Submit, ResumeState]:
        """Return a request's submission and its resume state. Raises ApiError; for any caller but its owner, the
        request does not exist."""
        try:
            submit = await self.client.recall(request_id)
        except ClientError as error:
            raise to_api_error(error) from None
        memo = ResumeState.decode(submit.memo)
        if memo is None or submit.tenant != caller.tenant:
            raise ApiError(404, f"there is no answer {request_id!r} that can be resumed", code="not_found")
        return submit, memo


def _visible_tokens(
    served: ServedModel, tools: ToolOptions, reasoning: ReasoningStart, *, show_special: bool
) -> tuple[int, ...]:
    """Return the special tokens whose text the client, or the parser of thinking or of tool calls, needs."""
    if show_special:
        return served.special_tokens
    marks = served.call_marks if tools.are_offered else ()
    return marks if reasoning == "none" else (*marks, *served.reasoning_marks)


def _recalled_tokens(memo: ResumeState, served: ServedModel) -> tuple[int, ...]:
    return _visible_tokens(served, _offered_tools(memo), memo.reasoning, show_special=memo.special)


def _make_assembler(
    request_id: str, tools: ToolOptions, reasoning: ReasoningStart, served: ServedModel, num_choices: int
) -> AnswerAssembler:
    make_parser = partial(served.reasoning_parser, reasoning)
    return AnswerAssembler(request_id, tools, served.tool_format, num_choices, make_parser)


def _offered_tools(memo: ResumeState) -> ToolOptions:
    tools = tuple(Tool(tool.name, custom=tool.custom) for tool in memo.tools)
    return ToolOptions(tools, parallel=memo.parallel)


def prompt_size(request: CompletionRequest, most: int) -> int:
    """Return the approximate length of a prompt: in characters, or in tokens where those were given. Counting stops at
    ``most``."""
    if request.messages is None:
        return len(request.prompt)
    tools = request.tools.tools if request.tools.are_offered else ()
    return size_as_text([request.messages, [(tool.description, tool.parameters) for tool in tools]], most)


def prepare_prompt(
    request: CompletionRequest, served: ServedModel, how: ChatRendering, images: Sequence[PreparedImage] = ()
) -> tuple[CompletionRequest, tuple[int, ...], ReasoningStart]:
    """Return the request with the grammar that its tools need, its prompt's tokens, and how its answer begins.
    ``images``: those of which its messages have the control tokens."""
    limits_text = request.params.grammar is not None or request.tools.choice in ("required", "named")
    request = add_tool_grammar(request, served)
    ids = encode_prompt(request, served, how)
    if images and served.manifest.vision is not None:
        ids, spans = place_images(ids, images, served.manifest.vision, request.client_name_of("prompt"))
        params = msgspec.structs.replace(request.params, images=spans)
        request = replace(request, params=params, pixels=tuple(image.pixels for image in images))
    if request.messages is None:
        return request, ids, "none"
    return begin_thinking(request, ids, served, limits_text=limits_text)


def begin_thinking(
    request: CompletionRequest, ids: tuple[int, ...], served: ServedModel, *, limits_text: bool
) -> tuple[CompletionRequest, tuple[int, ...], ReasoningStart]:
    """Return the request and its prompt with what a budget or a grammar needs: they apply to thinking that the prompt
    has opened. So the prompt opens it where the model would, and where it would not, a grammar applies at once.
    ``limits_text``: the request has a grammar that leaves no text for thinking."""
    start, family, grammar = served.reasoning_start(ids), served.reasoning_format, request.params.grammar
    budget = request.reasoning.budget
    if family is None or start == "none" or (grammar is None and budget is None):
        return request, ids, start
    text = served.require_text_model("it can't think")
    if start == "optional":
        if request.continues or not served.switches.is_thinking(template_variables(request, served)):
            return request, ids, "none" if limits_text else "optional"
        ids = (*ids, *text.encode(family.opening, add_special_tokens=False))
    is_call = request.tools.choice in ("required", "named")
    end = family.end_of("anything" if grammar is None else "call" if is_call else "text")
    closing = text.encode(end.closing, add_special_tokens=False)
    params = msgspec.structs.replace(request.params, thinking=Thinking(end.texts, budget, closing))
    return replace(request, params=params), ids, "opened"


def add_tool_grammar(request: CompletionRequest, served: ServedModel) -> CompletionRequest:
    """Add the grammar that forces a call, if the model must call a tool, or that restricts the arguments of calls, if a
    tool is strict."""
    grammar = request.params.grammar
    if request.tools.choice in ("required", "named"):
        grammar = served.tool_format.forced_call_grammar(request.tools)
    elif request.tools.have_strict and grammar is None:
        # formats of other packages may have none
        optional = getattr(served.tool_format, "optional_call_grammar", None)
        grammar = None if optional is None else optional(request.tools)
    return replace(request, params=msgspec.structs.replace(request.params, grammar=grammar))


def encode_prompt(request: CompletionRequest, served: ServedModel, how: ChatRendering) -> tuple[int, ...]:
    """Return the prompt's tokens. Raises InvalidRequest, or ApiError if the model has no tokenizer."""
    if request.messages is not None:
        text = served.require_text_model("pass token ids to /v1/completions")
        if clash := request.template.keys() & {"self", "messages", "tools"}:
            raise invalid_field("chat_template_kwargs", f"{min(clash)} has a field of its own")
        adapted = adapt_conversation(request.messages, request.tools, served.tool_format, served.template_features)
        variables = {**template_variables(request, served), **adapted.variables}
        if request.continues:
            check_continued(adapted.messages[-1:])
        return text.encode_chat(adapted.messages, variables, most=served.manifest.context, how=how)
    if isinstance(request.prompt, tuple):
        return request.prompt
    return served.require_text_model("pass token ids").encode(request.prompt, most=served.manifest.context)


def template_variables(request: CompletionRequest, served: ServedModel) -> Mapping[str, Any]:
    """Return the variables for the chat template. The client's own precede those for its reasoning options."""
    return {**served.switches.variables(request.reasoning), **request.template}
