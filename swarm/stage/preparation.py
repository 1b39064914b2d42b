"""The plan that is loaded beside the one in force. One load at a time: a newer plan waits for the end of the one under
way, whose result is then judged by what is wanted."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.stage.actions import Action, Load, Note, Tell
from swarm.stage.executor import Capacity
from swarm.wire.messages import Prepare, Prepared, Refused


@dataclass(slots=True)
class Preparation:
    """What is wanted, what is loading, what is ready."""

    incarnation: str
    wanted: Prepare | None = None
    capacity: Capacity | None = None
    _loading: Prepare | None = field(default=None, init=False)

    def is_newer_than(self, epoch: int) -> bool:
        return self.wanted is not None and epoch < self.wanted.epoch

    def want(self, order: Prepare) -> list[Action]:
        self.wanted = order
        self.capacity = None
        return [] if self._loading is not None else self._load(order)

    def take(self, epoch: int) -> Prepare | None:
        """The plan of this epoch, if it is ready; it is no longer in preparation then."""
        plan = self.wanted
        if plan is None or plan.epoch != epoch or self.capacity is None:
            return None
        self.wanted = None
        return plan

    def loaded(self, epoch: int, capacity: Capacity) -> list[Action]:
        other = self._ended(epoch)
        if other is not None:
            return other
        self.capacity = capacity
        message = Prepared(
            epoch=epoch,
            incarnation=self.incarnation,
            kv_capacity=capacity.kv_tokens,
            max_sequences=capacity.max_sequences,
            load_s=capacity.load_s,
            warm_up_s=capacity.warm_up_s,
            resident_bytes=capacity.resident_bytes,
            kernels=capacity.kernels,
        )
        fields = {
            "epoch": epoch,
            "layers": "" if self.wanted is None else str(self.wanted.layers),
            "load_s": round(capacity.load_s, 3),
            "warm_up_s": round(capacity.warm_up_s, 3),
            "kv_capacity": capacity.kv_tokens,
        }
        return [Note("plan_prepared", "info", fields | self._cause()), Tell(message)]

    def failed(self, epoch: int, reason: str) -> list[Action]:
        other = self._ended(epoch)
        if other is not None:
            return other
        fields = {"epoch": epoch, "reason": reason} | self._cause()
        self.wanted = None
        refused = Refused(epoch=epoch, incarnation=self.incarnation, reason=reason[:4000])
        return [Note("load_failed", "error", fields), Tell(refused)]

    def _cause(self) -> dict[str, object]:
        return {"cause": self.wanted.cause} if self.wanted is not None and self.wanted.cause else {}

    def _ended(self, epoch: int) -> list[Action] | None:
        """A load ended: what to do if it was not the one that is wanted by now, else None."""
        self._loading = None
        if self.wanted is None:
            return []
        return self._load(self.wanted) if self.wanted.epoch != epoch else None

    def _load(self, order: Prepare) -> list[Action]:
        self._loading = order
        return [Load(order.epoch, order.layers, order.standby, order.max_sequences)]
