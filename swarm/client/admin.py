"""Administration methods of a client: reports, workers, plans and keys."""

from __future__ import annotations

from typing import Literal

from swarm.client.events import Question, Reply
from swarm.client.model import ASK_TIMEOUT_S
from swarm.errors import InvalidRequest, RequestFailed
from swarm.wire.messages import (
    AdapterCommand,
    Invite,
    Join,
    Json,
    KeyMessage,
    PlanCommand,
    PlanWhatIf,
    Query,
    Report,
    Rotate,
    RotateBroker,
    RotateMember,
    ShowSettings,
    StopWorker,
)
from swarm.wire.messages import Revoke as RevokeKey

_COMMAND_TIMEOUT_S = 120.0  # starting workers, or handing over layers, takes a while
_LOAD_TIMEOUT_S = 600.0  # the broker gives up before

ReportName = Literal["status", "nodes", "plan", "recoveries", "stats", "requests", "keys"]


class AdminMixin:
    """Administration methods of a client. A command that the broker refuses raises RequestFailed with the broker's
    reason."""

    async def _ask(self, question: Question, timeout_s: float = ASK_TIMEOUT_S) -> Reply:
        raise NotImplementedError

    async def query(self, what: ReportName, *, all: bool = False, request_id: str = "") -> Json:
        """Return a report as ``swarmctl --json`` prints it. For "requests", ``all`` includes requests that ended long
        ago, as far as the broker's journal has them and they fit into one answer; ``request_id`` selects a single
        request that is still in memory."""
        return await self._command(Query(what=what, all=all, request_id=request_id), ASK_TIMEOUT_S)

    async def suppose_plan(self, suppose: PlanWhatIf) -> Json:
        """Return the plan that the broker would make under these assumptions. Nothing is changed."""
        return await self._command(Query(what="plan", suppose=suppose), ASK_TIMEOUT_S)

    async def trace(self, request_id: str = "") -> Json:
        """Return where the time of each token went, for a request in progress or recently ended. ``request_id`` may be
        a prefix of the id; empty selects the newest request. For a request that ended long ago, or before the broker
        restarted, only the data in the journal is available."""
        if len(request_id) > 128:
            raise InvalidRequest("a request_id has at most 128 characters", code="request_id")
        return await self._command(Query(what="trace", request_id=request_id), ASK_TIMEOUT_S)

    async def join(self, count: int = 1, memory_limit: int | None = None, device: str = "") -> Json:
        """Have a running ``swarm up`` start ``count`` workers, each with this memory limit in bytes, on this device."""
        if not 1 <= count <= 64:
            raise InvalidRequest(f"count must be between 1 and 64, not {count}", code="count")
        return await self._command(Join(count=count, memory_limit=memory_limit, device=device), _COMMAND_TIMEOUT_S)

    async def stop_worker(self, worker: str, *, force: bool = False, again: bool = False) -> Json:
        """Have a worker hand over its layers and leave. ``force``: even if the swarm cannot serve without it.
        ``again``: exit in such a way that ``swarm up`` or systemd restarts it."""
        if not 1 <= len(worker) <= 128:
            raise InvalidRequest("a worker's name has 1 to 128 characters", code="worker")
        return await self._command(StopWorker(worker=worker, force=force, again=again), _COMMAND_TIMEOUT_S)

    async def steer(self, steer: PlanCommand) -> Json:
        """Change which workers get layers (cordon, drain, pins), or have the plan made again. The change lasts until
        the broker's process ends."""
        return await self._command(steer, _COMMAND_TIMEOUT_S)

    async def adapters(self) -> Json:
        """Return the adapters that requests may name, with their source, state and number of requests."""
        return await self._command(AdapterCommand(verb="list"), ASK_TIMEOUT_S)

    async def load_adapter(self, name: str, source: str) -> Json:
        """Load a LoRA adapter on every worker: from a folder that each of them has, or by its name on a hub."""
        return await self._command(AdapterCommand(verb="load", name=name, source=source), _LOAD_TIMEOUT_S)

    async def drop_adapter(self, name: str) -> Json:
        """Refuse new requests for an adapter, and unload it when those that have it end."""
        return await self._command(AdapterCommand(verb="drop", name=name), ASK_TIMEOUT_S)

    async def settings(self, worker: str = "") -> Json:
        """Return the settings of the broker, or of the named worker, and the source of each. Passwords are left out."""
        if len(worker) > 128:
            raise InvalidRequest("a worker's name has 1 to 128 characters", code="worker")
        return await self._command(ShowSettings(worker=worker), ASK_TIMEOUT_S)

    async def invite(self, invite: Invite) -> Json:
        """Register an invitation at the broker. Its secret stays on this machine; the result has the broker's public
        key and the addresses to put into the invitation."""
        return await self._command(invite, ASK_TIMEOUT_S)

    async def revoke_key(self, name: str) -> Json:
        """Revoke a machine's key or an invitation, given its name or a prefix of its key."""
        if not 1 <= len(name) <= 128:
            raise InvalidRequest("a key's name has 1 to 128 characters", code="name")
        return await self._command(RevokeKey(name=name), ASK_TIMEOUT_S)

    async def rotate_key(self, key: str) -> Json:
        """Announce to the broker the public key that this machine will use from now on. The present key stays valid
        until the new one has been used."""
        return await self._command(Rotate(key=key), ASK_TIMEOUT_S)

    async def rotate_broker_key(self, *, now: bool = False) -> Json:
        """Have the broker replace its own key; if called again, return the progress. ``now``: discard the old key even
        if some machines have not received the new one yet. The result lists those machines."""
        return await self._command(RotateBroker(now=now), ASK_TIMEOUT_S)

    async def rotate_member_key(self, name: str) -> Json:
        """Have a member's machine replace its key, given its name or a prefix of its key. It does so now, or when it
        next connects."""
        if not 1 <= len(name) <= 128:
            raise InvalidRequest("a key's name has 1 to 128 characters", code="name")
        return await self._command(RotateMember(name=name), ASK_TIMEOUT_S)

    async def _command(
        self,
        question: Query | Join | StopWorker | PlanCommand | AdapterCommand | ShowSettings | KeyMessage,
        timeout_s: float,
    ) -> Json:
        report = await self._ask(question, timeout_s)
        assert isinstance(report, Report)
        if not report.ok:
            raise RequestFailed(str(report.body.get("error") or report.body.get("reason") or report.body))
        return report.body
