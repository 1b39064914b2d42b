"""Checks of adapters that are loaded and dropped at run time (I18).

What a client was told of an adapter holds, however often the broker restarts: a loaded one can be named until somebody
asks to drop it, and a dropped one can't. At the end members have what the broker's set names, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarm.broker import actions as broker_act
from swarm.broker.state import Request, State
from swarm.sim.checks.audit import Audit, Violation
from swarm.sim.schedules.schedule import UNLIKE_SOURCE
from swarm.sim.views import WorkerView
from swarm.wire.messages import AdapterCommand, Json, Rejected, Report


class AdapterCheck:
    """Check of the broker's actions about adapters, and of what workers have loaded."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._loaded: dict[str, str] = {}  # name -> key, as reported; without those that somebody asked to drop
        self._dropped: set[str] = set()  # keys, as reported
        self._unwanted: set[str] = set()  # names that somebody asked to drop since they were last to be loaded
        self.num_loaded = self.num_accepted = 0

    def on_command(self, command: AdapterCommand) -> None:
        """Take promises back: what is to be dropped or loaded is so before the answer comes, which may be lost."""
        if command.verb == "drop" and command.name is not None:
            self._loaded.pop(command.name, None)
            self._unwanted.add(command.name)
        elif command.verb == "load":
            self._unwanted.discard(command.name or "")
            self._dropped = {key for key in self._dropped if key.partition("@")[0] != command.name}

    def on_journal_changed(self) -> None:
        """Forget what was promised: the broker starts with another journal."""
        self._loaded.clear()
        self._dropped.clear()

    def on_action(self, action: broker_act.Action, state: State, *, is_repeated: bool) -> None:
        """Check an action. ``is_repeated``: writes are of an earlier moment, for a journal that was started over."""
        match action:
            case broker_act.SendToClient(_, Report("adapters", _, body)):
                self._on_report(body, state)
            case broker_act.SendToClient(_, Rejected(code="invalid") as rejected):
                self._on_refused(rejected)
            case broker_act.WriteAcceptance(submit=submit) if submit.params.adapter and not is_repeated:
                adapter = submit.params.adapter
                name = adapter.partition("@")[0]
                if adapter in self._dropped:
                    raise Violation(f"I18: {submit.request_id} is accepted with {adapter}, which was dropped")
                if self._loaded.get(name, adapter) != adapter:
                    raise Violation(f"I18: {name} stands for {self._loaded[name]}, {submit.request_id} gets {adapter}")
                self.num_accepted += 1
                self._audit.on_adapter_chosen(submit)
            case _:
                pass

    def _on_report(self, body: Json, state: State) -> None:
        name = str(body.get("adapter", ""))
        keys = [entry.key for entry in state.adapters.entries if entry.name == name]
        if body.get("state") == "loaded":
            if not keys and name not in self._unwanted:
                raise Violation(f"I18: {name} is reported as loaded, and is not in the set")
            self.num_loaded += 1
            if keys and keys[0] not in state.adapters.dropped:  # somebody may have asked for that before the report
                self._loaded[name] = keys[0]
        elif body.get("state") == "dropping":
            self._dropped |= state.adapters.dropped.keys() & set(keys)

    def _on_refused(self, rejected: Rejected) -> None:
        submit = self._audit.submits.get(rejected.request_id)
        if submit is None or not submit.params.adapter:
            return
        if submit.params.adapter in self._loaded:
            raise Violation(f"I18: {submit.request_id} is refused, and {submit.params.adapter} is loaded")
        self._audit.may_fail.add(submit.request_id)

    def check_given_up(self, request: Request, state: State) -> None:
        """Check that a request is given up for an adapter that was dropped, and that a worker can't load for long:
        where its host has other files, if there was one worker when it was loaded."""
        adapter = request.submit.params.adapter
        sources = [entry.source for entry in state.adapters.entries if entry.key == adapter]
        if adapter not in state.adapters.dropped or sources != [UNLIKE_SOURCE]:
            raise Violation(f"I18: {request.id} is given up for {adapter} from {sources}")
        self._audit.may_fail.add(request.id)

    def keeps_workers_out(self, state: State) -> bool:
        """Whether only some workers can load an adapter: one of a source of which each host has other files."""
        return any(entry.source == UNLIKE_SOURCE for entry in state.adapters.entries)

    def is_settled(self, state: State, workers: Iterable[WorkerView]) -> bool:
        """Whether nothing is being loaded or dropped, and all workers have the broker's set."""
        adapters = state.adapters
        is_over = adapters.load is None and not adapters.dropped
        return is_over and all(_loaded_keys(node) == adapters.keys for node in workers)

    def check_end(self, state: State, workers: Iterable[WorkerView]) -> None:
        adapters = state.adapters
        if adapters.load is not None or adapters.dropped:
            raise Violation(f"I18: at the end {adapters.load} is being loaded, and {adapters.dropped} dropped")
        for name, key in self._loaded.items():
            if key not in adapters.keys:
                raise Violation(f"I18: {name} was reported as loaded, and {key} is gone")
        for node in workers:
            if not (_loaded_keys(node) == node.executor.adapters == adapters.keys):
                text = f"{sorted(node.executor.adapters)} loaded, and reports {sorted(_loaded_keys(node))}"
                raise Violation(f"I18: {node.incarnation} has {text}, the set is {sorted(adapters.keys)}")


def _loaded_keys(node: WorkerView) -> frozenset[str]:
    return frozenset(node.core.adapters.loaded)
