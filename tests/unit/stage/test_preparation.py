"""Layers that are kept for others, and the plans that go before them."""

from __future__ import annotations

from swarm.stage import actions as act
from swarm.stage.executor import Capacity
from swarm.stage.pending_plan import PendingPlan
from swarm.wire.messages import Edge, KeepWarm, KeptWarm, LayerRange, Prepare

CAPACITY = Capacity(1024, 4, 0.1, 0.0, 0)
OWN, NEXT = LayerRange(0, 3), LayerRange(3, 5)


def prepare(epoch: int, layers: LayerRange = OWN, *standby: LayerRange) -> Prepare:
    return Prepare(epoch=epoch, layers=layers, standby=standby, edge=Edge("w1", "w1"), max_sequences=4)


def kept(actions: list[act.Action]) -> KeptWarm:
    """What is told about layers kept."""
    (message,) = [a.message for a in actions if isinstance(a, act.SendToBroker) and isinstance(a.message, KeptWarm)]
    return message


def serving(*standby: LayerRange) -> PendingPlan:
    found = PendingPlan("w0.1")
    found.prepare(prepare(1, OWN, *standby))
    found.on_loaded(1, CAPACITY)
    assert found.take_ready(1, None) is not None
    return found


def test_what_is_warm_is_told_when_it_is() -> None:
    """Nothing is said to be kept before it is loaded; what could not be loaded is missing from the answer."""
    preparation = serving(NEXT)
    assert preparation.load_standby(KeepWarm(epoch=1, layers=(NEXT,))) == [act.LoadStandby((NEXT,))]
    assert preparation.standby == ()
    told = kept(preparation.on_standby_loaded((LayerRange(3, 4),), 0.5, ""))
    assert (told.layers, told.wanted, told.load_s) == ((LayerRange(3, 4),), (NEXT,), 0.5)
    assert preparation.standby == (LayerRange(3, 4),)


def test_layers_count_as_soon_as_each_is_warm() -> None:
    """A load in the background takes long beside steps; a plan made meanwhile finds what is warm by then."""
    preparation = serving(NEXT)
    preparation.load_standby(KeepWarm(epoch=1, layers=(NEXT,)))
    first = LayerRange(3, 4)
    told = kept(preparation.on_standby_progressed((first,), 0.5))
    assert (told.epoch, told.layers, told.wanted, told.load_s) == (1, (first,), (first,), 0.5)
    assert preparation.standby == (first,)
    preparation.prepare(prepare(2, OWN, NEXT))
    preparation.on_standby_loaded((first,), 0.1, "")
    preparation.on_loaded(2, CAPACITY)
    assert preparation.take_ready(2, OWN) is not None
    assert preparation.standby == (first,)


def test_a_plan_goes_before() -> None:
    """A load for others is cut short when a plan comes, and the plan is loaded at its end, once."""
    preparation = serving(NEXT)
    preparation.load_standby(KeepWarm(epoch=1, layers=(NEXT,)))
    assert preparation.prepare(prepare(2, LayerRange(0, 5))) == [act.StopStandby()]
    actions = preparation.on_standby_loaded((LayerRange(3, 4),), 0.1, "")
    assert actions[-1] == act.LoadLayers(2, LayerRange(0, 5), (), 4, prepare(2, OWN).edge)
    assert kept(actions).layers == (LayerRange(3, 4),)


def test_nothing_is_loaded_for_others_beside_a_plan() -> None:
    """From the order to prepare to the activation: the broker asks again when the plan serves."""
    preparation = serving(NEXT)
    preparation.prepare(prepare(2))
    assert preparation.load_standby(KeepWarm(epoch=1, layers=(NEXT,))) == []
    preparation.on_loaded(2, CAPACITY)
    assert preparation.load_standby(KeepWarm(epoch=1, layers=(NEXT,))) == []
    assert preparation.take_ready(2, OWN) is not None
    assert preparation.load_standby(KeepWarm(epoch=2, layers=(NEXT,))) == [act.LoadStandby((NEXT,))]


def test_the_newest_wish_counts() -> None:
    """Another order while one is carried out ends that one, and is carried out next."""
    preparation = serving()
    preparation.load_standby(KeepWarm(epoch=1, layers=(NEXT,)))
    assert preparation.load_standby(KeepWarm(epoch=1, layers=(LayerRange(4, 6),))) == [act.StopStandby()]
    assert preparation.on_standby_loaded((), 0.0, "")[-1] == act.LoadStandby((LayerRange(4, 6),))
    assert not any(isinstance(a, act.LoadStandby) for a in preparation.on_standby_loaded((LayerRange(4, 6),), 0.0, ""))


def test_what_stays_over_a_change_of_plan() -> None:
    """Of what is loaded, kept or in use, exactly that which the new plan leaves room for and does not use itself."""
    preparation = serving(NEXT)
    preparation.load_standby(KeepWarm(epoch=1, layers=(NEXT,)))
    preparation.on_standby_loaded((NEXT,), 0.1, "")
    preparation.prepare(prepare(2, LayerRange(2, 4), LayerRange(0, 2), LayerRange(4, 6)))
    preparation.on_loaded(2, CAPACITY)
    preparation.take_ready(2, OWN)
    assert preparation.standby == (LayerRange(0, 2), LayerRange(4, 5))


def test_why_not_is_said() -> None:
    """A disk that fails is logged, and the answer says what there is."""
    preparation = serving(NEXT)
    preparation.load_standby(KeepWarm(epoch=1, layers=(NEXT,)))
    actions = preparation.on_standby_loaded((), 0.1, "disk on fire")
    assert any(isinstance(a, act.WriteStageLog) and a.fields["reason"] == "disk on fire" for a in actions)
    assert kept(actions).layers == ()


def test_a_plan_that_came_to_nothing() -> None:
    """The broker gave it up: an order to keep layers that is no older is carried out, and does not wait for ever."""
    preparation = serving(NEXT)
    preparation.prepare(prepare(2))
    preparation.on_loaded(2, CAPACITY)
    assert preparation.load_standby(KeepWarm(epoch=2, layers=(NEXT,))) == [act.LoadStandby((NEXT,))]
    assert preparation.take_ready(2, OWN) is None
    busy = serving(NEXT)
    busy.prepare(prepare(2))
    assert busy.load_standby(KeepWarm(epoch=2, layers=(NEXT,))) == []
    assert busy.on_loaded(2, CAPACITY) == [act.LoadStandby((NEXT,))]


def test_an_order_that_comes_again_is_answered_again() -> None:
    """Its first answer was lost: the same one, without loading anew. While it loads, there is nothing to say yet."""
    preparation = serving()
    assert preparation.prepare(prepare(2)) == [act.LoadLayers(2, OWN, (), 4, prepare(2, OWN).edge)]
    assert preparation.prepare(prepare(2)) == []
    told = preparation.on_loaded(2, CAPACITY)[-1]
    assert preparation.prepare(prepare(2)) == [told]
    assert preparation.take_ready(2, OWN) is not None


def test_a_plan_that_was_refused_is_not_tried_again() -> None:
    """The order that is said again may have crossed the refusal: that is told once more, and a newer plan is taken."""
    preparation = serving()
    assert preparation.prepare(prepare(2))
    *_, refused = preparation.on_load_failed(2, "no memory")
    assert isinstance(refused, act.SendToBroker)
    assert preparation.prepare(prepare(2)) == [refused]
    assert preparation.prepare(prepare(3)) != [refused]
