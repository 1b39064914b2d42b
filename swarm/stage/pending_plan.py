"""The plan that is loaded while another one serves, and the standby layers.

One load at a time. A newer plan waits for the end of the current load, whose result then counts only if it is still
wanted. A load of standby layers is cut short, and the layers loaded so far stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.stage.actions import Action, LoadLayers, LoadStandby, SendToBroker, StopStandby, WriteStageLog
from swarm.stage.events import Loaded, LoadFailed, StandbyLoaded, StandbyProgressed
from swarm.stage.executor import Capacity
from swarm.wire.messages import KeepWarm, KeptWarm, LayerRange, Prepare, Prepared, Refused, layers_of, to_ranges


@dataclass(slots=True)
class PendingPlan:
    """The wanted plan, the current load, and its result."""

    incarnation: str
    wanted: Prepare | None = None  # the plan to be activated next
    capacity: Capacity | None = None  # of ``wanted``, once it is loaded
    standby: tuple[LayerRange, ...] = ()  # standby layers: warm in addition to the layers of the plan in force
    bits: str = ""  # of everything loaded, after the last load; workers with equal ones compute equal keys and values
    _loading: Prepare | KeepWarm | None = field(default=None, init=False)  # the order whose layers are loading now
    # the latest order for standby layers, until they are loaded
    _standby_order: KeepWarm | None = field(default=None, init=False)
    _in_background: bool = field(default=False, init=False)  # another plan serves until the wanted one is ready
    _refused: Refused | None = field(default=None, init=False)  # the last plan that could not be prepared

    def has_newer_than(self, epoch: int) -> bool:
        return self.wanted is not None and epoch < self.wanted.epoch

    def forget_plans(self) -> None:
        """Drop the plans of a previous broker. A load in progress continues, but its result is ignored."""
        self.wanted = self.capacity = self._standby_order = self._refused = None

    def prepare(self, order: Prepare, *, in_background: bool = False) -> list[Action]:
        """Prepare a plan. ``in_background``: another plan is in force until then."""
        # a repeated order: the broker has not received the refusal
        if self._refused is not None and order.epoch == self._refused.epoch:
            return [SendToBroker(self._refused)]
        # a repeated order: the broker has not received the answer
        if self.wanted is not None and order.epoch == self.wanted.epoch:
            return [] if self.capacity is None else [self._report_prepared(self.capacity)]
        self.wanted = order
        self.capacity = None
        self._in_background = in_background
        match self._loading:
            case None:
                return self._load(order)
            case KeepWarm():
                return [StopStandby()]
            case Prepare():
                return []

    def take_ready(self, epoch: int, layers: LayerRange | None) -> Prepare | None:
        """Return the plan of this epoch if it is ready, and end its preparation.

        ``layers``: those in use so far. Of these and the standby layers, the plan's standby layers stay loaded.
        """
        plan = self.wanted
        if plan is None or plan.epoch != epoch or self.capacity is None:
            return None
        self.wanted = self._standby_order = None
        loaded = layers_of(self.standby) | layers_of(() if layers is None else (layers,))
        self.standby = to_ranges(loaded & layers_of(plan.standby) - layers_of((plan.layers,)))
        return plan

    def handle_event(self, event: Loaded | LoadFailed | StandbyProgressed | StandbyLoaded) -> list[Action]:
        """Handle the result of a load."""
        match event:
            case Loaded(epoch, capacity):
                return self.on_loaded(epoch, capacity)
            case LoadFailed(epoch, reason, cant_reach):
                return self.on_load_failed(epoch, reason, cant_reach)
            case StandbyProgressed(layers, load_s, bits):
                return self.on_standby_progressed(layers, load_s, bits)
            case StandbyLoaded(layers, load_s, problem, bits):
                return self.on_standby_loaded(layers, load_s, problem, bits)

    def on_loaded(self, epoch: int, capacity: Capacity) -> list[Action]:
        next_actions = self._finish_load()
        if next_actions is not None:
            return next_actions
        self.capacity = capacity
        self.bits = capacity.bits
        fields = {
            "epoch": epoch,
            "layers": "" if self.wanted is None else str(self.wanted.layers),
            "load_s": round(capacity.load_s, 3),
            "warm_up_s": round(capacity.warm_up_s, 3),
            "kv_capacity": capacity.kv_tokens,
        }
        return [WriteStageLog("plan_prepared", "info", fields | self._cause_field()), self._report_prepared(capacity)]

    def _report_prepared(self, capacity: Capacity) -> SendToBroker:
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
            share_unit=capacity.share_unit,
            share_mappings=capacity.share_mappings,
        )
        return SendToBroker(message)

    def on_load_failed(self, epoch: int, reason: str, unreachable_worker: str = "") -> list[Action]:
        next_actions = self._finish_load()
        if next_actions is not None:
            return next_actions
        fields = {"epoch": epoch, "reason": reason} | self._cause_field()
        self.wanted = None
        self._refused = Refused(
            epoch=epoch, incarnation=self.incarnation, reason=reason[:4000], cant_reach=unreachable_worker
        )
        return [WriteStageLog("load_failed", "error", fields), SendToBroker(self._refused)]

    @property
    def is_loading_standby(self) -> bool:
        """Whether standby layers are being loaded."""
        return isinstance(self._loading, KeepWarm)

    def drop_standby(self) -> tuple[LayerRange, ...]:
        """Mark all standby layers as dropped, and return them."""
        dropped, self.standby = self.standby, ()
        return dropped

    # --- standby layers ----------------------------------------------------------------------------------------------

    def load_standby(self, order: KeepWarm) -> list[Action]:
        """Load standby layers.

        While a newer plan is in preparation, the order is ignored: the broker repeats it when that plan serves. The
        broker sends no such order while it prepares a plan, so an older plan in preparation here has been abandoned.
        """
        if self.wanted is not None and order.epoch < self.wanted.epoch:
            return []
        self.wanted = self.capacity = None
        self._standby_order = order
        if self._loading is not None:
            return [StopStandby()] if isinstance(self._loading, KeepWarm) else []
        return self._load_standby(order)

    def on_standby_progressed(self, standby: tuple[LayerRange, ...], load_s: float, bits: str = "") -> list[Action]:
        """Report the standby layers that are warm so far. From then on the broker's plans may use them."""
        order = self._loading
        assert isinstance(order, KeepWarm)
        self.standby, self.bits = standby, bits
        return [self._report_standby(order, standby, load_s)]

    def on_standby_loaded(
        self, standby: tuple[LayerRange, ...], load_s: float, problem: str, bits: str = ""
    ) -> list[Action]:
        order, self._loading = self._loading, None
        assert isinstance(order, KeepWarm)
        self.standby, self.bits = standby, bits
        actions: list[Action] = []
        if problem:
            actions.append(WriteStageLog("standby_not_loaded", "warning", {"reason": problem}))
        actions.append(self._report_standby(order, order.layers, load_s))
        if self.wanted is not None:
            return actions + self._load(self.wanted)
        if self._standby_order is not None and self._standby_order is not order:
            return actions + self._load_standby(self._standby_order)
        self._standby_order = None
        return actions

    def _report_standby(self, order: KeepWarm, wanted: tuple[LayerRange, ...], load_s: float) -> SendToBroker:
        message = KeptWarm(
            epoch=order.epoch,
            incarnation=self.incarnation,
            layers=self.standby,
            wanted=wanted,
            load_s=load_s,
            bits=self.bits,
        )
        return SendToBroker(message)

    def _load_standby(self, order: KeepWarm) -> list[Action]:
        self._loading = order
        return [LoadStandby(order.layers)]

    # --- inside ------------------------------------------------------------------------------------------------------

    def _cause_field(self) -> dict[str, object]:
        return {"cause": self.wanted.cause} if self.wanted is not None and self.wanted.cause else {}

    def _finish_load(self) -> list[Action] | None:
        """End the current load. Return the next actions if its result is not wanted any more, else None.

        The orders themselves are compared, not their epochs: a plan of another broker may have the same epoch.
        """
        finished, self._loading = self._loading, None
        if self.wanted is None:
            return [] if self._standby_order is None else self._load_standby(self._standby_order)
        return self._load(self.wanted) if self.wanted is not finished else None

    def _load(self, order: Prepare) -> list[Action]:
        self._loading = order
        return [
            LoadLayers(
                order.epoch,
                order.layers,
                order.standby,
                order.max_sequences,
                order.edge,
                order.relay,
                self._in_background,
            )
        ]
