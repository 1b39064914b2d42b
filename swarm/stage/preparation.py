"""The plan that is loaded while another one serves, and the standby layers.

One load at a time. A newer plan waits for the end of the current load, whose result then counts only if it is still
wanted. A load of standby layers is cut short, and the layers loaded so far stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.stage.actions import Action, Load, LoadStandby, Note, StopStandby, Tell
from swarm.stage.executor import Capacity
from swarm.wire.messages import Keep, Kept, LayerRange, Prepare, Prepared, Refused, layers_of, ranges_of


@dataclass(slots=True)
class Preparation:
    """The wanted plan, the current load, and its result."""

    incarnation: str
    wanted: Prepare | None = None  # the plan to be activated next
    capacity: Capacity | None = None  # of ``wanted``, once it is loaded
    kept: tuple[LayerRange, ...] = ()  # standby layers: warm in addition to those of the plan in force
    _loading: Prepare | Keep | None = field(default=None, init=False)  # the order whose layers are loading now
    # the latest order for standby layers, until they are loaded
    _standby: Keep | None = field(default=None, init=False)
    _gently: bool = field(default=False, init=False)  # another plan serves until the wanted one is ready
    _refused: Refused | None = field(default=None, init=False)  # the last plan that could not be prepared

    def is_newer_than(self, epoch: int) -> bool:
        return self.wanted is not None and epoch < self.wanted.epoch

    def forget_plans(self) -> None:
        """Drop the plans of a former broker. A load that is running goes on, and its result is ignored."""
        self.wanted = self.capacity = self._standby = self._refused = None

    def want(self, order: Prepare, *, gently: bool = False) -> list[Action]:
        """Prepare a plan. ``in_background``: another plan is in force until then."""
        # a repeated order: the broker has not received the refusal
        if self._refused is not None and order.epoch == self._refused.epoch:
            return [Tell(self._refused)]
        # a repeated order: the broker has not received the answer
        if self.wanted is not None and order.epoch == self.wanted.epoch:
            return [] if self.capacity is None else [self._prepared(self.capacity)]
        self.wanted = order
        self.capacity = None
        self._gently = gently
        match self._loading:
            case None:
                return self._load(order)
            case Keep():
                return [StopStandby()]
            case Prepare():
                return []

    def take(self, epoch: int, layers: LayerRange | None) -> Prepare | None:
        """Return the plan of this epoch if it is ready, and end its preparation.

        ``layers``: those in use so far. Of these and the standby layers, the plan's standby layers stay loaded.
        """
        plan = self.wanted
        if plan is None or plan.epoch != epoch or self.capacity is None:
            return None
        self.wanted = self._standby = None
        loaded = layers_of(self.kept) | layers_of(() if layers is None else (layers,))
        self.kept = ranges_of(loaded & layers_of(plan.standby) - layers_of((plan.layers,)))
        return plan

    def loaded(self, epoch: int, capacity: Capacity) -> list[Action]:
        other = self._ended()
        if other is not None:
            return other
        self.capacity = capacity
        fields = {
            "epoch": epoch,
            "layers": "" if self.wanted is None else str(self.wanted.layers),
            "load_s": round(capacity.load_s, 3),
            "warm_up_s": round(capacity.warm_up_s, 3),
            "kv_capacity": capacity.kv_tokens,
        }
        return [Note("plan_prepared", "info", fields | self._cause()), self._prepared(capacity)]

    def _prepared(self, capacity: Capacity) -> Tell:
        assert self.wanted is not None
        message = Prepared(
            epoch=self.wanted.epoch,
            incarnation=self.incarnation,
            kv_capacity=capacity.kv_tokens,
            max_sequences=capacity.max_sequences,
            load_s=capacity.load_s,
            warm_up_s=capacity.warm_up_s,
            resident_bytes=capacity.resident_bytes,
            kernels=capacity.kernels,
            bits=capacity.bits,
        )
        return Tell(message)

    def failed(self, epoch: int, reason: str, cant_reach: str = "") -> list[Action]:
        other = self._ended()
        if other is not None:
            return other
        fields = {"epoch": epoch, "reason": reason} | self._cause()
        self.wanted = None
        self._refused = Refused(epoch=epoch, incarnation=self.incarnation, reason=reason[:4000], cant_reach=cant_reach)
        return [Note("load_failed", "error", fields), Tell(self._refused)]

    @property
    def loads_for_others(self) -> bool:
        """Whether standby layers are being loaded."""
        return isinstance(self._loading, Keep)

    def drop_kept(self) -> tuple[LayerRange, ...]:
        """Mark all standby layers as dropped, and return them."""
        dropped, self.kept = self.kept, ()
        return dropped

    # --- standby layers ----------------------------------------------------------------------------------------------

    def keep(self, order: Keep) -> list[Action]:
        """Load standby layers.

        While a newer plan is in preparation, the order is ignored: the broker repeats it when that plan serves. The
        broker sends no such order while it prepares a plan, so an older plan in preparation here has been abandoned.
        """
        if self.wanted is not None and order.epoch < self.wanted.epoch:
            return []
        self.wanted = self.capacity = None
        self._standby = order
        if self._loading is not None:
            return [StopStandby()] if isinstance(self._loading, Keep) else []
        return self._load_standby(order)

    def standby_progressed(self, kept: tuple[LayerRange, ...], load_s: float) -> list[Action]:
        """Report the standby layers that are warm so far: the broker counts on them from now on."""
        order = self._loading
        assert isinstance(order, Keep)
        self.kept = kept
        return [Tell(Kept(epoch=order.epoch, incarnation=self.incarnation, layers=kept, wanted=kept, load_s=load_s))]

    def standby_loaded(self, kept: tuple[LayerRange, ...], load_s: float, problem: str) -> list[Action]:
        order, self._loading = self._loading, None
        assert isinstance(order, Keep)
        self.kept = kept
        out: list[Action] = []
        if problem:
            out.append(Note("standby_not_loaded", "warning", {"reason": problem}))
        wanted = order.layers
        kept_now = Kept(epoch=order.epoch, incarnation=self.incarnation, layers=kept, wanted=wanted, load_s=load_s)
        out.append(Tell(kept_now))
        if self.wanted is not None:
            return out + self._load(self.wanted)
        if self._standby is not None and self._standby is not order:
            return out + self._load_standby(self._standby)
        self._standby = None
        return out

    def _load_standby(self, order: Keep) -> list[Action]:
        self._loading = order
        return [LoadStandby(order.layers)]

    # --- inside ------------------------------------------------------------------------------------------------------

    def _cause(self) -> dict[str, object]:
        return {"cause": self.wanted.cause} if self.wanted is not None and self.wanted.cause else {}

    def _ended(self) -> list[Action] | None:
        """End the current load. Return the next actions if its result is not wanted any more, else None.

        The orders themselves are compared, not their epochs: a plan of another broker may have the same epoch.
        """
        ended, self._loading = self._loading, None
        if self.wanted is None:
            return [] if self._standby is None else self._load_standby(self._standby)
        return self._load(self.wanted) if self.wanted is not ended else None

    def _load(self, order: Prepare) -> list[Action]:
        self._loading = order
        return [
            Load(order.epoch, order.layers, order.standby, order.max_sequences, order.edge, order.relay, self._gently)
        ]
