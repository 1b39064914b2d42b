"""What can be asked of a swarm beside answers to prompts, and what it can be told to do: reports, workers, keys."""

from __future__ import annotations

from typing import Literal

from swarm.client.events import Question, Reply
from swarm.client.model import ASK_TIMEOUT_S
from swarm.errors import InvalidRequest, RequestFailed
from swarm.wire.messages import (
    Invite,
    Join,
    Json,
    LockMessage,
    Query,
    Report,
    Rotate,
    RotateBroker,
    RotateMember,
    ShowSettings,
    Steer,
    StopWorker,
    Suppose,
)
from swarm.wire.messages import Revoke as RevokeKey

_GOVERN_TIMEOUT_S = 120.0  # starting workers, or handing over layers, takes a while

What = Literal["status", "nodes", "plan", "recoveries", "stats", "requests", "keys"]


class Governor:
    """The part of a client that governs a swarm. Orders that the broker refuses raise RequestFailed, in its words."""

    async def _ask(self, question: Question, timeout_s: float = ASK_TIMEOUT_S) -> Reply:
        raise NotImplementedError

    async def query(self, what: What, *, all: bool = False, request_id: str = "") -> Json:
        """A report as ``swarmctl --json`` prints it. With "requests", ``all`` are also those that ended long ago, as
        far as the broker's journal has them and an answer holds; ``request_id`` is one alone, if memory has it."""
        return await self._govern(Query(what=what, all=all, request_id=request_id), ASK_TIMEOUT_S)

    async def suppose_plan(self, suppose: Suppose) -> Json:
        """The plan that would be made if things were so; nothing is changed."""
        return await self._govern(Query(what="plan", suppose=suppose), ASK_TIMEOUT_S)

    async def trace(self, request_id: str = "") -> Json:
        """Where each token's time went, of a request under way or ended lately; the beginning of its id suffices, none
        means the newest. Of one that ended long ago, or before the broker started again, only what its journal has."""
        if len(request_id) > 128:
            raise InvalidRequest("a request_id has at most 128 characters", code="request_id")
        return await self._govern(Query(what="trace", request_id=request_id), ASK_TIMEOUT_S)

    async def join(self, count: int = 1, memory_limit: int | None = None) -> Json:
        """Have a running ``swarm up`` start workers."""
        if not 1 <= count <= 64:
            raise InvalidRequest(f"count must be between 1 and 64, not {count}", code="count")
        return await self._govern(Join(count=count, memory_limit=memory_limit), _GOVERN_TIMEOUT_S)

    async def stop_worker(self, worker: str, *, force: bool = False, again: bool = False) -> Json:
        """Have a worker hand over its layers and leave. ``force``: even if the swarm can't serve without it. ``again``:
        and end so that ``swarm up`` or systemd starts it anew."""
        if not 1 <= len(worker) <= 128:
            raise InvalidRequest("a worker's name has 1 to 128 characters", code="worker")
        return await self._govern(StopWorker(worker=worker, force=force, again=again), _GOVERN_TIMEOUT_S)

    async def steer(self, steer: Steer) -> Json:
        """Say who gets layers, or have the plan made anew; what is said lasts as long as the broker's process."""
        return await self._govern(steer, _GOVERN_TIMEOUT_S)

    async def settings(self, worker: str = "") -> Json:
        """By which settings the broker runs, or the worker of this name, and where each comes from; no passwords."""
        if len(worker) > 128:
            raise InvalidRequest("a worker's name has 1 to 128 characters", code="worker")
        return await self._govern(ShowSettings(worker=worker), ASK_TIMEOUT_S)

    async def invite(self, invite: Invite) -> Json:
        """Have the broker take an invitation, whose secret stays here: its public key and the addresses to tell."""
        return await self._govern(invite, ASK_TIMEOUT_S)

    async def revoke_key(self, name: str) -> Json:
        """Take away a machine's key, or an invitation: by its name or how the key begins."""
        if not 1 <= len(name) <= 128:
            raise InvalidRequest("a key's name has 1 to 128 characters", code="name")
        return await self._govern(RevokeKey(name=name), ASK_TIMEOUT_S)

    async def rotate_key(self, key: str) -> Json:
        """Tell the broker the public key by which this machine will knock; the present one counts until it has."""
        return await self._govern(Rotate(key=key), ASK_TIMEOUT_S)

    async def rotate_broker_key(self, *, now: bool = False) -> Json:
        """Have the broker change its own key; said again, how far that is. ``now``: put the old one away, whoever does
        not know the new one yet. Who those are is in the answer."""
        return await self._govern(RotateBroker(now=now), ASK_TIMEOUT_S)

    async def rotate_member_key(self, name: str) -> Json:
        """Have a member's machine change its key, by its name or how its key begins: now, or when it is there."""
        if not 1 <= len(name) <= 128:
            raise InvalidRequest("a key's name has 1 to 128 characters", code="name")
        return await self._govern(RotateMember(name=name), ASK_TIMEOUT_S)

    async def _govern(
        self, question: Query | Join | StopWorker | Steer | ShowSettings | LockMessage, timeout_s: float
    ) -> Json:
        report = await self._ask(question, timeout_s)
        assert isinstance(report, Report)
        if not report.ok:
            raise RequestFailed(str(report.body.get("error") or report.body.get("reason") or report.body))
        return report.body
