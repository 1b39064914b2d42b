"""The swarms behind a gateway, each with one model. A request's ``model`` selects the swarm; one that does not answer
does not delay requests for the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from swarm.client.client import AsyncClient
from swarm.errors import ClientError, InvalidRequest
from swarm.gateway.completion.served_model import ServedModel
from swarm.gateway.completion.service import Caller, CompletionService
from swarm.gateway.errors import ApiError
from swarm.wire.messages import Description

MODEL_WAIT_S = 1.0  # seconds to wait for the models of swarms that have not answered yet

ANYONE = Caller()

R = TypeVar("R")


class Swarms:
    """The completion services of a gateway, at least one, in the order of the configuration."""

    def __init__(self, services: Sequence[CompletionService]) -> None:
        self.services = tuple(services)
        self.first = self.services[0]

    async def select(self, model: str | None, caller: Caller) -> tuple[CompletionService, ServedModel]:
        """Return the swarm that serves a model (None: the first that the caller may use). If there is only one swarm,
        its API checks the name. Raises ApiError."""
        if model is not None:
            await self._look_for(model, caller)
        swarm = self.first if len(self.services) == 1 else await self._choose(model, caller)
        served = await swarm.served_model()
        if not caller.may_use(served.name):
            raise self._unknown_model(model or served.name, caller)
        return swarm, served.named(model)

    async def _look_for(self, model: str, caller: Caller) -> None:
        """Have the swarms described again if none has this name: it may be of an adapter that was loaded just now."""
        known = self._known(caller)
        if known and not any(served.has_name(model) for _, served in known):
            await _gather([each.look_again() for each, _ in known], MODEL_WAIT_S)

    async def _choose(self, model: str | None, caller: Caller) -> CompletionService:
        if self._silent() and not self._is_settled(model, caller):
            await self._wait_for_models()
        swarm = self._find_default(caller) if model is None else self._find(model, caller)
        if swarm is not None:
            return swarm
        if silent := self._silent():
            urls = ", ".join(each.client.url for each in silent)
            which = "the request, which names no model," if model is None else repr(model)
            text = f"no swarm serves {which} now; the model of {urls} is not known yet"
            raise ApiError(503, text, code="unavailable", retry_after_s=2.0)
        raise self._unknown_model(model, caller)

    def _is_settled(self, model: str | None, caller: Caller) -> bool:
        """Whether the models of silent swarms cannot change the choice. One of them may have this name, which precedes
        aliases."""
        if model is None:
            return self._find_default(caller) is not None
        return any(served.is_own_name(model) for _, served in self._known(caller))

    def _find(self, model: str, caller: Caller) -> CompletionService | None:
        """Return the swarm of a model by its own name, or else by another one."""
        known = self._known(caller)
        by_name = (each for each, served in known if served.is_own_name(model))
        by_alias = (each for each, served in known if served.has_name(model))
        return next(by_name, None) or next(by_alias, None)

    def _find_default(self, caller: Caller) -> CompletionService | None:
        """Return the first swarm that the caller may use; None if there is none, or if a silent one may precede it."""
        known = dict(self._known(caller))
        is_complete = bool(caller.models) and caller.models == {served.name for served in known.values()}
        for each in self.services:
            if each in known:
                return each
            if each.last_served_model is None and not is_complete:
                return None
        return None

    def _known(self, caller: Caller) -> list[tuple[CompletionService, ServedModel]]:
        """Return the swarms whose model is known, as far as the caller may use them."""
        known = [(each, served) for each in self.services if (served := each.last_served_model)]
        return [(each, served) for each, served in known if caller.may_use(served.name)]

    def _silent(self) -> list[CompletionService]:
        """Return the swarms whose model is not known yet."""
        return [each for each in self.services if each.last_served_model is None]

    async def _wait_for_models(self, *, refresh: bool = False) -> list[ApiError]:
        """Wait a moment for the models of swarms that have not answered yet; with ``refresh``, of all. A single swarm
        has the time that it needs. Returns the errors."""
        asked = self.services if refresh else self._silent()
        limit_s = MODEL_WAIT_S if len(self.services) > 1 else None
        results = await _gather([each.served_model() for each in asked], limit_s)
        return [result for result in results if isinstance(result, ApiError)]

    def _unknown_model(self, model: str | None, caller: Caller) -> ApiError:
        names = ", ".join(served.name for _, served in self._known(caller)) or "none"
        which = ", or is not for this key, which may use" if caller.models else ": the models here are"
        text = f"the model {model!r} does not exist{which} {names}"
        return ApiError(404, text, param="model", code="model_not_found")

    async def models(self, caller: Caller) -> list[tuple[ServedModel, str]]:
        """Return the models that a caller may use, and their adapters, each with its swarm's state. Raises ApiError if
        none is known."""
        errors = await self._wait_for_models(refresh=True)
        if len(self._silent()) == len(self.services):
            raise errors[0] if errors else ApiError(503, "no swarm answers", code="unavailable", retry_after_s=2.0)
        return [
            (served.named(name), each.state)
            for each, served in self._known(caller)
            for name in (None, *served.adapters)
        ]

    def own_name(self, model: str, caller: Caller) -> str | None:
        """Return our name of a model; None if we do not serve it to this caller, "" while none of our models is
        known."""
        if len(self._silent()) == len(self.services):
            return ""
        swarm = self._find(model, caller)
        return None if swarm is None or swarm.last_served_model is None else swarm.last_served_model.name

    def max_context(self) -> int:
        """Return the longest context of the models; 0 if none is known."""
        return max((served.manifest.context for _, served in self._known(ANYONE)), default=0)

    async def find_answer(self, request_id: str, caller: Caller) -> CompletionService:
        """Return the swarm that has an answer. Raises ApiError."""
        if len(self.services) == 1:
            return self.first
        index, _ = await _first_success(
            [each.recall(request_id, caller) for each in self.services],
            ApiError,
            lambda error: error.status == 404,
        )
        return self.services[index]

    async def trace(self, request_id: str) -> dict[str, Any]:
        """Return a request's trace, from the swarm that has it. Raises ClientError."""
        if len(self.services) == 1:
            return await self.first.client.trace(request_id)
        traces = [each.client.trace(request_id) for each in self.services]
        return (await _first_success(traces, ClientError, lambda error: isinstance(error, InvalidRequest)))[1]

    async def best_description(self) -> Description:
        """Return the description of a serving swarm, or else of the first that answers. Raises ApiError."""
        if len(self.services) > 1 and not any(each.state == "serving" for each in self.services):
            await self._wait_for_models(refresh=True)
        states = [(each.state != "serving", number) for number, each in enumerate(self.services)]
        return await self.services[min(states)[1]].description()

    def client_for(self, model: str | None) -> AsyncClient:
        """Return the client of a model's swarm; None: the first. Raises ApiError if no swarm is known to serve it."""
        if model is None:
            return self.first.client
        swarm = self._find(model, ANYONE)
        if swarm is None:
            raise self._unknown_model(model, ANYONE)
        return swarm.client

    async def aclose(self) -> None:
        for each in self.services:
            await each.aclose()
            await each.client.aclose()


async def _gather(calls: Sequence[Coroutine[Any, Any, object]], limit_s: float | None) -> list[object]:
    """Return the calls' results and errors, at most for this time."""
    waiting = [asyncio.ensure_future(each) for each in calls]
    try:
        await asyncio.wait(waiting, timeout=limit_s)
    finally:
        for task in waiting:
            task.cancel()
        results = await asyncio.gather(*waiting, return_exceptions=True)
    return results


async def _first_success(
    calls: Sequence[Coroutine[Any, Any, R]], kind: type[Exception], is_unknown: Callable[[Any], bool]
) -> tuple[int, R]:
    """Await calls at once. Returns index and result of the first that succeeds; the others are cancelled. If all
    raise an error of this ``kind``, raises one that is not ``is_unknown``, since that swarm may be the right one."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    errors: list[Exception] = []
    try:
        pending = set(tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                try:
                    return tasks.index(task), task.result()
                except kind as error:
                    errors.append(error)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    raise next((error for error in errors if not is_unknown(error)), errors[0])
