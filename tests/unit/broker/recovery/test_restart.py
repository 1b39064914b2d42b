"""A broker that starts again: what workers hold counts, and nothing that they hold is computed again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarm.broker.actions import WriteEpoch
from swarm.broker.core import CoreSettings
from swarm.broker.events import JournalBroke, JournalMended, Tick
from swarm.broker.recovery.reconfiguration import ReconfigurationSettings
from swarm.broker.recovery.restart import REJOIN_S
from swarm.broker.requests.tokens import build_timing
from swarm.broker.state import SequenceState
from swarm.broker.state.journal_snapshot import JournalSnapshot, RequestRecord, SequenceRecord
from swarm.testing import fake_manifest
from swarm.wire.messages import (
    Activate,
    Denied,
    LayerRange,
    LogRange,
    Query,
    Replay,
    Report,
    SequencePosition,
)
from tests.unit.broker.bench import Bench, holds, orders, ranges, row, said, settings, submit

OWN = {"w0": LayerRange(0, 3), "w1": LayerRange(3, 6)}
GENERATED = [7, 7, 7, 7]


def past(*generated: int, epoch: int = 9, workers: tuple[str, ...] = ("w0", "w1")) -> JournalSnapshot:
    """One request of three tokens, of which so many more are in the journal."""
    request = RequestRecord(
        submit("r", max_tokens=16, ignore_eos=True), "tenant", 2.0, [SequenceRecord(5, 0, list(generated))]
    )
    return JournalSnapshot(epoch, workers, next_sequence=6, requests=(request,))


def starting(min_workers: int) -> CoreSettings:
    """As for a swarm that is started with so many workers."""
    return settings(plan=ReconfigurationSettings(settle_s=0.0, min_workers=min_workers, gather_s=30.0))


def come_back(bench: Bench, name: str, position: int | None, log: int = 0) -> None:
    """A worker that outlived the broker says what it holds of the sequence."""
    layers = OWN[name]
    held = () if position is None else (holds(5, position, layers),)
    logs = (LogRange(5, layers.stop, 0, log),) if log else ()
    worker = bench.workers.get(name) or bench.add(name)
    bench.tell(name, worker.hello(epoch=9, held_layers=layers, held=held, logs=logs))


def stand_still(bench: Bench, pause_s: float) -> None:
    """The broker's own process gets no time, and ticks again."""
    bench.now += pause_s
    bench.feed(Tick())


def test_what_is_taken_back_has_begun(make_bench: Callable[..., Bench]) -> None:
    """From then on, as far as this broker knows: how long it waited and how long it took follows from that."""
    bench = make_bench(past=past(*GENERATED))
    come_back(bench, "w1", 6)
    come_back(bench, "w0", 6)
    bench.tick()
    assert bench.sequence().started_at is not None
    assert bench.sequence().started_at <= bench.now


def test_what_is_held_everywhere_goes_on(make_bench: Callable[..., Bench]) -> None:
    """The next step carries the one token that the stages have not seen; nothing is replayed."""
    bench = make_bench(past=past(*GENERATED))
    come_back(bench, "w1", 6)
    come_back(bench, "w0", 6)
    bench.tick()
    assert ranges(bench) == OWN
    lives = [order.live for _, order in orders(bench.log, Activate) if isinstance(order, Activate)]
    assert lives == [(SequencePosition(5, 6),)] * 2
    assert [row(step) for step in bench.pipe] == [[(5, 6, 1)]]
    assert bench.pipe[0].open[0].tokens[:3] == (1, 2, 3)
    assert orders(bench.log, Replay) == []
    bench.run_dry()
    assert bench.sequence().num_generated == 16


def test_the_epoch_is_above_all_that_were(make_bench: Callable[..., Bench]) -> None:
    """The journal tells of them."""
    bench = make_bench(past=past(*GENERATED))
    bench.held = {WriteEpoch}
    come_back(bench, "w0", 6)
    come_back(bench, "w1", 6)
    bench.tick()
    assert bench.write_out() != []
    assert bench.state.plans.epoch == 10


@pytest.mark.parametrize(("ahead", "resumes"), [(6, 6), (7, 6), (9, 6)])
def test_tokens_that_the_journal_never_got(make_bench: Callable[..., Bench], ahead: int, resumes: int) -> None:
    """Stages may have gone further than the journal knows: only positions whose tokens are known count, and the last
    known one is computed again, since the token after it must be drawn."""
    bench = make_bench(past=past(*GENERATED))
    come_back(bench, "w0", ahead)
    come_back(bench, "w1", ahead)
    bench.tick()
    assert [row(step) for step in bench.pipe] == [[(5, resumes, 1)]]


def test_who_lags_behind_is_brought_level(make_bench: Callable[..., Bench]) -> None:
    """The step in hand had reached the first stage only; its log serves the second, through its own layers."""
    bench = make_bench(past=past(*GENERATED))
    bench.add("w0", logged={5: 6})
    bench.add("w1", held={5: 5})
    come_back(bench, "w0", 6, log=6)
    come_back(bench, "w1", 5)
    bench.tick()
    (found,) = orders(bench.log, Replay)
    assert found[0] == "w0.1"
    assert isinstance(found[1], Replay)
    assert (found[1].boundary, found[1].start, found[1].stop, found[1].through) == (3, 5, 6, LayerRange(3, 6))


def test_known_workers_are_waited_for(make_bench: Callable[..., Bench]) -> None:
    """A plan without them would compute again what they hold; whoever stays away is not waited for long."""
    bench = make_bench(past=past(*GENERATED))
    come_back(bench, "w0", 6)
    bench.tick(REJOIN_S / 2)
    assert bench.state.plans.current is None
    assert bench.state.plans.waits_for == "the workers from before the restart: w1"
    bench.tick(REJOIN_S)
    assert ranges(bench) == {"w0": LayerRange(0, 6)}
    bench.run_dry()
    assert bench.sequence().num_generated == 16


def test_the_brokers_own_pause_is_no_lateness_of_those_awaited(make_bench: Callable[..., Bench]) -> None:
    """Nobody could be heard in that minute: they have as much time after it as they had before."""
    bench = make_bench(past=past(*GENERATED))
    come_back(bench, "w0", 6)
    bench.tick(REJOIN_S / 2)
    stand_still(bench, 60.0)
    assert bench.state.plans.waits_for == "the workers from before the restart: w1"
    come_back(bench, "w1", 6)
    bench.tick()
    assert ranges(bench) == OWN


def test_nor_of_those_that_were_started_again(make_bench: Callable[..., Bench]) -> None:
    """Neither where fewer than are wanted are there, nor in the moment for those that come one after the other."""
    bench = make_bench(starting(2), past=past(*GENERATED, workers=("w0", "w1", "w2")))
    come_back(bench, "w0", None)
    stand_still(bench, 60.0)
    bench.tick(REJOIN_S)
    assert bench.state.plans.waits_for == "the workers from before the restart: w1, w2"
    come_back(bench, "w1", None)
    stand_still(bench, 20.0)
    bench.tick(REJOIN_S / 2)
    assert bench.state.plans.waits_for == "the workers from before the restart: w2"
    bench.tick(REJOIN_S)
    assert set(ranges(bench)) == {"w0", "w1"}


def test_nor_of_those_that_a_first_plan_waits_for(make_bench: Callable[..., Bench]) -> None:
    """Half a minute of time in which the broker could hear them."""
    bench = make_bench(starting(2))
    bench.join("w0")
    stand_still(bench, 60.0)
    bench.tick(29.0)
    assert bench.state.plans.waits_for == "1 more of 2 workers"
    bench.tick(2.0)
    assert set(ranges(bench)) == {"w0"}


def test_nobody_holds_anything(make_bench: Callable[..., Bench]) -> None:
    """All processes were started again: prompt and known tokens are computed like a prompt, and it goes on."""
    bench = make_bench(past=past(*GENERATED))
    come_back(bench, "w0", None)
    come_back(bench, "w1", None)
    bench.tick()
    assert bench.sequence().state is SequenceState.RUNNING
    assert row(bench.pipe[0]) == [(5, 0, 7)]
    bench.run_dry()
    assert bench.sequence().tokens[3:7] == GENERATED
    assert bench.sequence().num_generated == 16


def test_an_end_that_the_journal_did_not_hear_of(make_bench: Callable[..., Bench]) -> None:
    """The last token known is an end of sequence: nothing is computed after it."""
    request = RequestRecord(submit("r", max_tokens=16), "tenant", 2.0, [SequenceRecord(5, 0, [7, 0])])
    bench = make_bench(past=JournalSnapshot(9, ("w0",), 6, (request,)))
    bench.join("w0")
    bench.tick()
    assert bench.sequence().reason == "stop"
    assert not bench.pipe


def test_an_empty_past_waits_for_nobody(make_bench: Callable[..., Bench]) -> None:
    """A first start with a journal is a first start."""
    bench = make_bench(past=JournalSnapshot())
    bench.join("w0")
    bench.tick()
    assert bench.epoch == 1


def test_requests_are_taken_before_the_first_worker_is_back(make_bench: Callable[..., Bench]) -> None:
    """The model is known from before, so nobody is sent away for the moment that it takes."""
    bench = make_bench(past=JournalSnapshot(9, ("w0",), 6, manifest=fake_manifest()))
    bench.say(submit("new"))
    assert bench.state.requests["new"].accepted
    bench.join("w0")
    bench.tick()
    bench.run_dry()
    assert bench.sequence("new").reason == "length"


def test_another_model_ends_what_the_old_one_was_asked(make_bench: Callable[..., Bench]) -> None:
    """Whoever starts the swarm again with another model gets that one; what the old one was asked ends, and why."""
    before = past(*GENERATED)
    bench = make_bench(past=JournalSnapshot(9, ("w0",), 6, before.requests, manifest=fake_manifest()))
    bench.join("w0", manifest=fake_manifest(num_layers=4))
    bench.tick()
    assert bench.state.manifest == fake_manifest(num_layers=4)
    assert bench.sequence().reason == "failed"
    assert "another model: num_layers: 6 here, 4 there" in bench.sequence().detail
    bench.say(submit("new"))
    bench.run_dry()
    assert bench.sequence("new").reason == "length"


def test_a_new_request_is_nobody_s(make_bench: Callable[..., Bench]) -> None:
    """Numbers of sequences fell back (a backup, a damaged journal), and workers hold another's under the number of a
    request that came since: it begins at its beginning, and later ones get numbers that nobody has used."""
    bench = make_bench(past=JournalSnapshot(9, ("w0", "w1"), next_sequence=5, manifest=fake_manifest()))
    bench.say(submit("new", max_tokens=4, ignore_eos=True))
    assert bench.sequence("new").id == 5
    come_back(bench, "w0", 2)
    come_back(bench, "w1", 2)
    bench.tick()
    assert row(bench.pipe[0]) == [(5, 0, 3)]
    lives = [order.live for _, order in orders(bench.log, Activate) if isinstance(order, Activate)]
    assert lives == [(), ()]
    bench.say(submit("next"))
    assert bench.sequence("next").id == 6


def test_a_stranger_with_another_model(make_bench: Callable[..., Bench]) -> None:
    """While the known workers are on their way, nobody else takes the swarm away from them."""
    before = past(*GENERATED)
    bench = make_bench(past=JournalSnapshot(9, ("w0", "w1"), 6, before.requests, manifest=fake_manifest()))
    bench.join("stranger", manifest=fake_manifest(num_layers=4))
    (denied,) = [order for _, order in orders(bench.log, Denied)]
    assert isinstance(denied, Denied)
    assert "another model" in denied.reason
    come_back(bench, "w0", 6)
    come_back(bench, "w1", 6)
    bench.tick()
    bench.run_dry()
    assert bench.sequence().reason == "length"


def test_processes_that_start_are_waited_for_longer(make_bench: Callable[..., Bench]) -> None:
    """Nobody holds anything: all were started again. The first one back does not load the whole model meanwhile."""
    bench = make_bench(starting(2), past=past(*GENERATED))
    come_back(bench, "w0", None)
    bench.tick(2 * REJOIN_S)
    assert bench.state.plans.current is None
    come_back(bench, "w1", None)
    bench.tick()
    assert bench.state.plans.is_serving
    assert len(ranges(bench)) == 2


def test_fewer_than_are_wanted_wait_as_at_a_first_start(make_bench: Callable[..., Bench]) -> None:
    """Half a minute, and no longer: one of those that were started may never come."""
    bench = make_bench(starting(2), past=past(*GENERATED))
    come_back(bench, "w0", None)
    bench.tick(29.5)
    assert bench.state.plans.waits_for == "the workers from before the restart: w1"
    bench.tick(1.0)
    assert ranges(bench) == {"w0": LayerRange(0, 6)}


def test_fewer_are_started_than_there_were(make_bench: Callable[..., Bench]) -> None:
    """All that are wanted are there, and nobody holds anything: whoever else there was may not have been started at
    all, and gets the moment in which workers that are started together come."""
    bench = make_bench(starting(1), past=JournalSnapshot(9, ("w0", "w1"), 6))
    bench.tick(9.0)
    bench.join("w0")
    bench.tick(REJOIN_S - 0.5)
    assert bench.state.plans.waits_for == "the workers from before the restart: w1"
    bench.tick(1.0)
    assert ranges(bench) == {"w0": LayerRange(0, 6)}


def test_as_many_as_before_and_others(make_bench: Callable[..., Bench]) -> None:
    """One that had joined later is not started with the others; that holds nobody up, either."""
    bench = make_bench(starting(2), past=JournalSnapshot(9, ("w0", "w1", "joined"), 6))
    bench.tick(9.0)
    bench.join("w0")
    bench.tick(2 * REJOIN_S)
    bench.join("w1")
    bench.tick(REJOIN_S + 0.5)
    assert set(ranges(bench)) == {"w0", "w1"}


def test_while_one_comes_after_the_other_there_is_no_plan(make_bench: Callable[..., Bench]) -> None:
    """Several machines that were switched on together, where one worker would do: the first ones don't load what the
    next ones will hold."""
    bench = make_bench(starting(1), past=past(*GENERATED, workers=("w0", "w1", "w2")))
    bench.tick(9.0)
    for name in ("w0", "w1"):
        bench.join(name)
        bench.tick(REJOIN_S - 0.5)
        assert bench.state.plans.current is None
    bench.join("w2")
    bench.tick()
    assert set(ranges(bench)) == {"w0", "w1", "w2"}


def test_what_is_warm_is_known_from_the_first_word(make_bench: Callable[..., Bench]) -> None:
    """A worker died with the broker. The others have its layers warm, and say so: nothing is loaded."""
    bench = make_bench(past=past(*GENERATED, workers=("w0", "w1", "w2")))
    for name, layers, kept in (("w0", LayerRange(0, 2), LayerRange(2, 3)), ("w2", LayerRange(4, 6), LayerRange(3, 4))):
        held = (holds(5, 6, layers),)
        bench.tell(name, bench.add(name, kept=(kept,)).hello(epoch=9, held_layers=layers, held=held))
    bench.tick(REJOIN_S + 0.5)
    assert ranges(bench) == {"w0": LayerRange(0, 3), "w2": LayerRange(3, 6)}
    current = bench.state.plans.current
    assert current is not None
    assert [stage.load_bytes for stage in current.stages] == [0, 0]


def test_it_is_told_as_a_recovery(make_bench: Callable[..., Bench]) -> None:
    """With what was predicted and what it took; and the times of what the dead broker saw are not made up."""
    bench = make_bench(past=past(*GENERATED))
    come_back(bench, "w0", 6)
    come_back(bench, "w1", 6)
    bench.tick()
    bench.run_dry()
    (found,) = bench.state.recoveries.past
    assert found.as_json()["cause"] == "the broker was started again"
    assert (found.layer_positions, found.num_sequences) == (0, 1)
    told = build_timing(bench.sequence(), bench.now)
    assert (told.queued_s, told.first_token_s) == (0.0, 0.0)


def test_a_loss_of_everything_is_told_too(make_bench: Callable[..., Bench]) -> None:
    """Nobody holds anything of what was under way: all that is known to have been computed is computed again."""
    bench = make_bench(past=past(*GENERATED))
    come_back(bench, "w0", None)
    come_back(bench, "w1", None)
    bench.tick()
    (found,) = bench.state.recoveries.past
    told = found.as_json()
    assert told["cause"] == "the broker was started again, and no worker held anything"
    assert told["choice"] == "a plan from scratch"
    assert (told["sequences"], told["layer_positions"], told["least_layer_positions"]) == (1, 36, 36)
    bench.run_dry()
    assert bench.sequence().reason == "length"


def test_a_loss_of_nothing_is_none(make_bench: Callable[..., Bench]) -> None:
    """Everything was started again, and no request was under way."""
    bench = make_bench(past=JournalSnapshot(9, ("w0",), 6, manifest=fake_manifest()))
    bench.say(submit("new"))
    bench.join("w0")
    bench.tick()
    bench.run_dry()
    assert bench.sequence("new").reason == "length"
    assert bench.state.recoveries.report(bench.state.now) == {"recoveries": []}


def test_what_the_journal_holds_up_is_said(make_bench: Callable[..., Bench]) -> None:
    """A loss while nothing can be written: the epoch waits, and the status names the disk, not the workers."""
    bench = make_bench(settings(plan=ReconfigurationSettings(settle_s=0.0))).serve(2)
    bench.say(submit(max_tokens=8, ignore_eos=True))
    bench.finish()
    bench.feed(JournalBroke("the disk is full"))
    bench.held = {WriteEpoch}
    bench.lose("w1")
    assert bench.state.plans.waits_for == "the journal to write epoch 2, which it can't: the disk is full"
    bench.write_out()
    bench.feed(JournalMended())
    bench.run_dry()
    assert bench.sequence().reason == "length"


def test_deaths_are_remembered(make_bench: Callable[..., Bench]) -> None:
    """A request that takes workers with it does not begin anew with each broker: the third death ends it."""
    bench = make_bench().serve(3)
    bench.say(submit(max_tokens=16, ignore_eos=True))
    bench.lose("w2")
    (written,) = [a for a in bench.log if isinstance(a, WriteEpoch)]
    sequence = bench.sequence().id
    assert written.blames == ((sequence, 1),)
    before = past(*GENERATED)
    bench = make_bench(
        past=JournalSnapshot(9, ("w0", "w1"), 6, before.requests, manifest=fake_manifest(), blames=((5, 2),))
    )
    come_back(bench, "w0", 6)
    come_back(bench, "w1", 6)
    bench.tick()
    bench.lose("w1")
    assert bench.sequence().reason == "failed"
    assert "quarantined" in bench.sequence().detail


def test_what_was_wrong_with_the_journal_is_told(make_bench: Callable[..., Bench]) -> None:
    """In the status, for as long as this broker lives: nobody has to find it in the log."""
    bench = make_bench(past=JournalSnapshot(9, ("w0",), 6, notes=("the journal was damaged",)))
    (answer,) = said(bench.say(Query(what="status")), Report)
    assert isinstance(answer, Report)
    assert answer.body["journal_notes"] == ["the journal was damaged"]


def test_who_holds_the_sequences_is_waited_for(make_bench: Callable[..., Bench]) -> None:
    """While the next plan loads, that is whoever has a part in the one in force, though the next has none for it."""
    bench = make_bench().serve(2)
    bench.mute = {"w0", "w1", "w2"}
    bench.join("w2")
    bench.take()
    bench.tick()
    (written,) = [action for action in bench.log if isinstance(action, WriteEpoch)]
    assert {"w0", "w1"} <= set(written.workers)
