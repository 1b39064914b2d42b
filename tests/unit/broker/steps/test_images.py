"""Which parts of images a step has, and which of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import pytest

from swarm.broker.actions import WriteEnd
from swarm.broker.events import RequestRead
from swarm.broker.recovery.rebuild import RebuildSettings
from swarm.broker.requests import admission
from swarm.broker.state import SequenceState
from swarm.broker.steps.images import MAX_PATCHES
from swarm.params import ImageSpan, image_digest
from swarm.testing import fake_manifest
from swarm.wire.messages import (
    BLOCK,
    MAX_FEATURE_TOKENS,
    PART_PATCHES,
    Accepted,
    Cancel,
    DataPathError,
    ImageParts,
    LayerRange,
    Manifest,
    Rejected,
    Replay,
    ReplayDone,
    SequencePosition,
    ServerMessage,
    Step,
    StepFailure,
    Submit,
    Vision,
)
from tests.unit.broker.bench import (
    MIB,
    Bench,
    orders,
    ranges,
    request_settings,
    row,
    said,
    scheduling,
    settings,
    steps,
    submit,
)

VISION = Vision(
    token=90,
    begin=91,
    end=92,
    patch=1,
    merge=2,
    least=4,
    most=2**30,
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
    num_layers=2,
    depth=6,
)
LARGEST = (64, 64)  # tokens: gateway.image_tokens is at most 4,096
PARTS = 64 * (VISION.depth + 1)  # of the largest image

MakeBench = Callable[..., Bench]


def seeing() -> Manifest:
    return msgspec.structs.replace(fake_manifest(context=1 << 14), vision=VISION)


def serve(make_bench: MakeBench, num_workers: int = 1, **fields: object) -> Bench:
    return make_bench(scheduling(**fields)).serve(num_workers, manifest=seeing(), kv_capacity=1 << 15)


def ask(name: str, *parts: int | tuple[int, int], seed: int = 0, **fields: object) -> Submit:
    """A request whose prompt is text (a number of tokens) and images (rows and columns) in turn."""
    prompt: list[int] = []
    images: list[ImageSpan] = []
    pixels: list[bytes] = []
    for number, part in enumerate(parts):
        if isinstance(part, int):
            prompt += [1 + n % 80 for n in range(part)]
            continue
        rows, columns = part
        pixels.append(bytes([seed + number]) * (rows * columns * VISION.token_bytes))
        images.append(ImageSpan(len(prompt), rows, columns, image_digest(rows, columns, pixels[-1])))
        prompt += [VISION.token] * (rows * columns)
    request = submit(name, prompt=tuple(prompt), images=tuple(images), **fields)
    return msgspec.structs.replace(request, pixels=tuple(pixels))


def parts_of(step: Step) -> list[tuple[int, int]]:
    """(first, stop) of what a step computes of images."""
    return [(parts.first, parts.stop) for parts in step.image_parts or () if parts.stop]


def run(bench: Bench, limit: int = 2000, **times: float) -> Iterator[Step]:
    """Finish steps one after the other, each in the time that its parts and tokens take."""
    for _ in range(limit):
        if not bench.pipe:
            return
        step = bench.pipe[0]
        yield step
        patches = sum((stop - first) * PART_PATCHES for first, stop in parts_of(step))
        bench.now += times.get("step_s", 0.0) + times.get("patch_s", 0.0) * patches
        bench.finish()
    raise AssertionError("the pipe never runs dry")


def start_answer(bench: Bench, name: str = "text", **fields: object) -> None:
    bench.say(submit(name, max_tokens=10_000, ignore_eos=True, **fields))
    bench.finish()


def until_tokens(bench: Bench, sequence: int, **times: float) -> list[Step]:
    """The steps before the first one that has tokens of this sequence."""
    before = []
    for step in run(bench, **times):
        if any(r.sequence == sequence for r in step.rows):
            return before
        before.append(step)
    raise AssertionError("it never gets a step")


def test_an_answer_gets_a_token_with_each_step_while_the_largest_image_is_computed(make_bench: MakeBench) -> None:
    """A token comes with each step, and no step has more than one part: a stream's longest gap is that of a step."""
    bench = serve(make_bench)
    start_answer(bench)
    request = ask("seen", LARGEST, 5)
    bench.say(request)
    found = [step for step in until_tokens(bench, 2) if parts_of(step)]
    assert [row(step) for step in found] == [[(1, found[0].rows[0].start + n, 1)] for n in range(PARTS - 1)]
    last = bench.pipe[0]  # its tokens join the step with the last part
    assert [parts_of(step) for step in (*found, last)] == [[(n, n + 1)] for n in range(PARTS)]
    assert VISION.part_patches(64 * 64) == PART_PATCHES
    assert row(last)[1] == (2, 0, 256)
    first, *others = found
    assert [image.pixels for image in first.pixels or ()] == list(request.pixels)
    assert not any(step.pixels for step in others)


def test_parts_take_as_long_as_the_rest_of_a_step(make_bench: MakeBench) -> None:
    bench = serve(make_bench)
    start_answer(bench)
    bench.now += 0.02
    bench.finish()
    bench.say(ask("seen", LARGEST))
    nums = [
        stop - first
        for step in until_tokens(bench, 2, step_s=0.02, patch_s=0.002 / PART_PATCHES)
        for first, stop in parts_of(step)
    ]
    assert nums[0] == 1  # not measured yet
    assert set(nums[3:-1]) <= {9, 10}


def test_a_target_leaves_prompts_what_images_take(make_bench: MakeBench) -> None:
    bench = serve(make_bench, step_target_s=0.05)
    start_answer(bench)
    for _ in range(5):
        bench.now += 0.02
        bench.finish()
    bench.say(ask("seen", LARGEST))
    bench.say(submit("long", num_prompt=400))
    before = bench.state.costs.expected_s(1)
    tokens = []
    for step in run(bench, step_s=0.02, patch_s=0.02 / PART_PATCHES):
        if not parts_of(step):
            continue
        assert all(stop - first == 1 for first, stop in parts_of(step))
        tokens.append(len(step.tokens))
        if len(tokens) == 6:
            break
    assert bench.state.costs.expected_s(1) == pytest.approx(before)  # a step with parts says nothing of its size
    assert max(tokens[2:]) < 400  # the rest of the target, not a whole step


def test_nobody_waits_for_more_than_a_few_parts(make_bench: MakeBench) -> None:
    """Without running answers, a step has more parts: but a request that arrives joins the next step."""
    bench = serve(make_bench)
    bench.say(ask("seen", LARGEST))
    assert parts_of(bench.pipe[0]) == [(0, MAX_PATCHES // PART_PATCHES)]
    assert (bench.pipe[0].rows, bench.pipe[0].tokens) == ((), ())
    bench.say(submit("text"))
    (step,) = steps(bench.finish())
    assert row(step) == [(2, 0, 3)]


def test_text_before_an_image_does_not_wait_for_it(make_bench: MakeBench) -> None:
    bench = serve(make_bench)
    start_answer(bench)
    bench.say(ask("seen", 20, LARGEST, 7))
    bench.finish()
    assert (row(bench.pipe[0])[1:], parts_of(bench.pipe[0])) == ([(2, 0, 20)], [(0, 1)])
    bench.finish()
    assert (row(bench.pipe[0])[1:], parts_of(bench.pipe[0])) == ([], [(1, 2)])


def test_small_images_share_a_step(make_bench: MakeBench) -> None:
    bench = serve(make_bench)
    bench.say(ask("seen", 3, (2, 2), 3, (3, 3), 3))
    (step,) = bench.pipe
    assert parts_of(step) == [(0, VISION.depth + 1)] * 2
    assert row(step) == [(1, 0, 22)]


def test_the_next_image_waits_until_there_is_room(make_bench: MakeBench) -> None:
    """The first stage keeps the features of images that steps still need, and of no more than it has room for."""
    bench = serve(make_bench)
    request = ask("seen", (30, 30), 5, (30, 31), 5, (4, 4))
    bench.say(request)
    order: list[object] = []
    for step in run(bench):
        order += [
            ("computed", parts.image.start)
            for parts in step.image_parts or ()
            if parts.stop == VISION.num_parts(parts.image.num_tokens)
        ]
        order += [("dropped", parts.image.digest) for parts in step.image_parts or () if not parts.stop]
        order += [("tokens", r.start + r.count) for r in step.rows]
    assert order[0] == ("computed", 0)
    second = order.index(("computed", 905))
    assert order.index(("tokens", 905)) < second
    assert order.index(("computed", 1840)) > second
    assert order.index(("dropped", request.params.images[0].digest)) < second + 1
    assert MAX_FEATURE_TOKENS < 900 + 930


def test_one_image_of_several_requests_is_computed_once(make_bench: MakeBench) -> None:
    bench = serve(make_bench)
    bench.say(ask("a", (16, 16), 5))
    bench.say(ask("b", (16, 16), 5))
    computed = [parts for step in run(bench) for parts in parts_of(step)]
    assert sum(stop - first for first, stop in computed) == VISION.num_parts(256)


def test_a_cancelled_image_is_dropped_in_the_middle(make_bench: MakeBench) -> None:
    bench = serve(make_bench)
    start_answer(bench)
    request = ask("seen", LARGEST)
    bench.say(request)
    for _ in range(5):
        bench.finish()
    bench.say(Cancel(request_id="seen"))
    bench.finish()
    (dropped,) = bench.pipe[0].image_parts or ()
    assert (dropped.image.digest, dropped.stop) == (request.params.images[0].digest, 0)
    bench.finish()
    assert not bench.pipe[0].image_parts
    other = ask("other", LARGEST, seed=9)
    bench.say(other)
    bench.finish()
    assert (parts_of(bench.pipe[0]), bench.pipe[0].pixels[0].pixels) == ([(0, 1)], other.pixels[0])


def test_a_suspects_image_is_dropped_in_the_middle(make_bench: MakeBench) -> None:
    """Nothing else may join the step that releases the suspect."""
    bench = serve(make_bench)
    request = ask("seen", LARGEST)
    bench.say(request)
    fail(bench, "w0", "seen")
    bench.tick()
    assert bench.state.evidence.suspects == {bench.sequence("seen").id}
    bench.finish()
    assert bench.state.images.begun is not None
    bench.say(Cancel(request_id="seen"))
    bench.finish()
    (dropped,) = bench.pipe[0].image_parts or ()
    assert (dropped.image.digest, dropped.stop) == (request.params.images[0].digest, 0)
    assert bench.state.images.begun is None


def test_a_preempted_sequence_goes_on_with_its_image(make_bench: MakeBench) -> None:
    bench = serve(make_bench)
    start_answer(bench)
    bench.say(ask("seen", LARGEST))
    for _ in range(5):
        bench.finish()
    (before,) = parts_of(bench.pipe[0])
    bench.state.preempt(bench.sequence("seen"))
    assert bench.sequence("seen").state is SequenceState.WAITING
    bench.finish()
    assert parts_of(bench.pipe[0]) == [(before[1], before[1] + 1)]


def test_an_image_is_computed_again_after_a_loss_in_the_middle(make_bench: MakeBench) -> None:
    """The next plan's first stage may be another worker, so it gets the pixels, too."""
    bench = make_bench(settings()).serve(2, manifest=seeing(), kv_capacity=1 << 15)
    start_answer(bench)
    request = ask("seen", LARGEST)
    bench.say(request)
    for _ in range(9):
        bench.finish()
    assert all(first > 0 for first, _ in parts_of(bench.pipe[0]))
    lost = bench.epoch
    bench.lose("w1")
    bench.join("w2", manifest=seeing(), kv_capacity=1 << 15)
    bench.tick(3.0)
    assert bench.epoch > lost
    step = next(step for step in bench.pipe if parts_of(step))
    assert parts_of(step)[0][0] == 0
    assert [image.pixels for image in step.pixels or ()] == list(request.pixels)
    assert bench.sequence("seen").num_deaths == 1  # its image was in a step in flight


def test_a_failed_part_is_evidence_against_its_request(make_bench: MakeBench) -> None:
    bench = serve(make_bench)
    start_answer(bench)
    request = ask("seen", LARGEST)
    bench.say(request)
    bench.finish()
    (parts,) = bench.pipe[0].image_parts or ()
    assert isinstance(parts, ImageParts)
    failed = StepFailure(LayerRange(0, 6), (SequencePosition(parts.sequence, parts.image.stop),), is_memory=False)
    bench.tell("w0", DataPathError(epoch=bench.epoch, incarnation="w0.1", reason="it broke", failed=failed))
    assert bench.state.evidence.suspects == {2}


def test_replays_wait_for_images_that_steps_compute(make_bench: MakeBench) -> None:
    """Sequences without images are rebuilt first, together, and go on while the image of the other one is computed. Its
    replays have steps of their own."""
    bench = make_bench(settings()).serve(3, manifest=seeing(), kv_capacity=1 << 15)
    bench.say(ask("seen", (40, 40), 5, max_tokens=500, ignore_eos=True))
    for name in ("text", "more"):
        bench.say(submit(name, max_tokens=10_000, ignore_eos=True))
    for _ in run(bench):
        if bench.sequence("seen").num_generated > 3 and bench.sequence("more").num_generated > 3:
            break
    lost, first, _ = (stage.name for stage in bench.state.plans.current.stages)
    bench.workers[first].held = {s.id: 0 for s in bench.state.running}
    before = {name: bench.sequence(name).num_generated for name in ("text", "more")}
    bench.take()
    bench.lose(lost)
    assert bench.state.plans.is_serving
    assert not orders(bench.log, Replay)  # all from tokens
    replays: list[list[int]] = []
    parts: list[tuple[int, int]] = []
    while not bench.state.rebuilding.is_idle:
        step = bench.pipe[0]
        if any(r.sequence == 1 for each in bench.pipe if each.replay for r in each.rows):
            assert not any(parts_of(each) for each in bench.pipe), "stages may compute replays before steps"
        if step.replay:
            replays.append([r.sequence for r in step.rows])
            replay_done(bench, bench.pipe.popleft(), first)
            continue
        parts += parts_of(step)
        bench.tick()
        if step in bench.pipe:
            bench.finish(step)
    # two steps are in flight
    assert all(bench.sequence(name).num_generated - num >= 80 for name, num in before.items())
    assert replays[0] == [2, 3]
    assert replays[1:] == [[1]] * len(replays[1:])
    assert len(replays) > 2
    assert (parts[0][0], sum(stop - begin for begin, stop in parts)) == (0, VISION.num_parts(1600))


def test_each_replay_has_the_pixels_of_its_images(make_bench: MakeBench) -> None:
    """Several small ones wait at the same time, and others share steps."""
    bench = make_bench(settings()).serve(3, manifest=seeing(), kv_capacity=1 << 15, host="one")
    names = ("a", "b", "c")
    for seed, name in enumerate(names):
        bench.say(ask(name, 3, (4, 4), 5, seed=seed, max_tokens=500, ignore_eos=True))
    bench.say(submit("text", max_tokens=500, ignore_eos=True))
    for _ in run(bench):
        if all(bench.sequence(name).num_generated > 3 for name in (*names, "text")):
            break
    lost, first, last = (stage.name for stage in bench.state.plans.current.stages)
    bench.workers[first].held = {s.id: 0 for s in bench.state.running}
    bench.lose(lost)
    images, ready = {s.id: s.images[0] for s in map(bench.sequence, names)}, bench.state.images.ready
    while any(image.digest not in ready for image in images.values()):
        bench.finish(next(step for step in bench.pipe if not step.replay))
    seen: dict[int, str] = {}
    while not bench.state.rebuilding.is_idle:
        if not bench.pipe[0].replay:
            bench.finish()
            continue
        step = bench.pipe.popleft()
        seen |= {r.sequence: pixels.digest for r in step.rows for pixels in step.pixels or ()}
        replay_done(bench, step, last)
    assert seen == {sequence: image.digest for sequence, image in images.items()}


def fail(bench: Bench, worker: str, *names: str) -> None:
    """The step raises that has the images of these requests, or their tokens."""
    rows = [(s.id, s.images[0].stop if s.images else s.scheduled) for s in map(bench.sequence, names)]
    failed = StepFailure(ranges(bench)[worker], tuple(SequencePosition(*each) for each in rows), is_memory=False)
    incarnation = bench.workers[worker].incarnation
    bench.tell(worker, DataPathError(epoch=bench.epoch, incarnation=incarnation, reason="it broke", failed=failed))


def rebuild(bench: Bench) -> list[Step]:
    """Finish steps and replays until all layers are rebuilt. Return the steps."""
    done = []
    for _ in range(2000):
        if bench.state.rebuilding.is_idle:
            return done
        step = bench.pipe[0]
        if step.replay:
            last = next(stage for stage in bench.state.plans.current.stages if stage.layers.stop == step.through.stop)
            replay_done(bench, bench.pipe.popleft(), last.name)
            continue
        done.append(step)
        bench.tick()
        if step in bench.pipe:
            bench.finish(step)
    raise AssertionError("layers are never rebuilt")


@pytest.mark.parametrize("suspect", ["seen", "text"])
def test_sequences_are_rebuilt_with_their_image_while_one_is_suspect(make_bench: MakeBench, suspect: str) -> None:
    bench = make_bench(settings()).serve(3, manifest=seeing(), kv_capacity=1 << 15)
    bench.say(ask("seen", (40, 40), 5, max_tokens=500, ignore_eos=True))
    start_answer(bench)
    for _ in run(bench):
        if bench.sequence("seen").num_generated > 3 and bench.sequence("text").num_generated > 3:
            break
    lost, first, _ = (stage.name for stage in bench.state.plans.current.stages)
    bench.workers[first].held = {s.id: 0 for s in bench.state.running}
    fail(bench, lost, suspect)
    bench.lose(lost)
    assert bench.state.evidence.suspects == {bench.sequence(suspect).id}
    assert any(parts_of(step) for step in bench.pipe)  # without waiting for the other one's replays
    done = [step for step in rebuild(bench) if parts_of(step)]
    assert sum(stop - begin for step in done for begin, stop in parts_of(step)) == VISION.num_parts(1600)
    assert suspect == "text" or not any(step.rows for step in done)  # alone


@pytest.mark.parametrize("shape", [(16, 16), (26, 26)])  # there is room for several, or for one
def test_suspects_with_images_take_turns(make_bench: MakeBench, shape: tuple[int, int]) -> None:
    """After a suspect has failed alone, it is the other one's turn, whose image comes later."""
    bench = serve(make_bench)
    for number, name in enumerate("abc"):
        bench.say(ask(name, shape, 5, seed=number))
    fail(bench, "w0", "a", "b")
    assert bench.state.evidence.suspects == {1, 2}
    for step in run(bench):
        if any(parts.sequence == 1 and parts.stop for parts in step.image_parts or ()):
            break
    bench.tick()
    fail(bench, "w0", "a")
    owners = [parts.sequence for step in run(bench) for parts in step.image_parts or () if parts.stop]
    assert owners.index(2) < owners.index(1)
    assert all(request.has_ended for request in bench.state.requests.values())


def test_answers_go_on_while_a_suspect_s_image_waits(make_bench: MakeBench) -> None:
    """The suspect's turn passes without a step while another image is computed in part."""
    bench = serve(make_bench)
    start_answer(bench)
    bench.say(ask("large", LARGEST))
    bench.say(ask("odd", (2, 2), seed=5))
    fail(bench, "w0", "odd")
    (odd,) = bench.state.evidence.suspects
    done: list[Step] = []
    while not done or all(parts.sequence != odd for parts in done[-1].image_parts or ()):
        assert len(bench.pipe) == 1
        done.append(bench.pipe[0])
        assert len(steps(bench.finish())) == 1  # without waiting for another event
    assert sum(bool(parts_of(step)) for step in done) == PARTS + 1
    assert all(step.rows[0].sequence == 1 for step in done[:-1])
    assert [r.sequence for r in done[-1].rows] == [odd]


def test_a_sequence_that_waits_for_a_prefix_leaves_room_for_images(make_bench: MakeBench) -> None:
    """Of two sequences with a common prefix, the one that is rebuilt first has an image. So has the other one, which
    waits for it with less work."""
    unit = 2 * BLOCK
    of = scheduling(mode="batch", kv_headroom=BLOCK, step_tokens=4096, prefill_chunk=4096)
    bench = make_bench(replace(of, plan=replace(of.plan, rebuild=RebuildSettings(chunk=unit))))
    worker = {"kv_capacity": 1 << 14, "share_unit": unit, "memory_bytes": 67 * MIB, "manifest": seeing()}
    bench.serve(3, **worker)
    bench.join("spare", **worker)
    for name, shape in (("a", (28, 25)), ("b", (20, 20))):
        bench.say(ask(name, 320, shape, 5, seed=ord(name), max_tokens=500, ignore_eos=True))
        for _ in run(bench):
            if bench.sequence(name).num_generated > 2:
                break
    assert bench.state.shared.saved == 320
    assert MAX_FEATURE_TOKENS < 700 + 400
    bench.workers["spare"].held = {s.id: 0 for s in bench.state.running}
    bench.lose(bench.state.plans.current.stages[1].name)
    for _ in range(50):
        if bench.state.plans.is_serving:
            break
        bench.tick()
    assert bench.state.prefixes.is_blocked(bench.sequence("b"))
    owners = [parts.sequence for step in rebuild(bench) for parts in step.image_parts or () if parts.stop]
    assert list(dict.fromkeys(owners)) == [1, 2]


def replay_done(bench: Bench, step: Step, name: str) -> None:
    reached = [SequencePosition(r.sequence, r.start + r.count) for r in step.rows]
    message = ReplayDone(
        epoch=step.epoch,
        incarnation=bench.workers[name].incarnation,
        sequence=reached[0].sequence,
        layers=step.through,
        kv=reached[0].position,
        more=tuple(reached[1:]),
    )
    bench.tell(name, message)


@pytest.mark.parametrize("has_journal", [False, True])
def test_pixels_take_memory_until_their_request_ends(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch, has_journal: bool
) -> None:
    """With a journal until it has the end, though they count no longer."""
    monkeypatch.setattr(admission, "MAX_HELD_PIXELS", VISION.token_bytes * 256)
    bench = make_bench(settings(requests=request_settings(has_journal=has_journal)))
    bench.serve(1, manifest=seeing(), kv_capacity=1 << 15)
    bench.held.add(WriteEnd)

    def rejections(name: str, seed: int) -> list[ServerMessage]:
        actions = bench.say(ask(name, (16, 16), seed=seed, max_tokens=2))
        return said(actions + (bench.feed(RequestRead(name, None)) if has_journal else []), Rejected)

    assert not rejections("first", 0)
    (rejected,) = rejections("early", 1)
    assert isinstance(rejected, Rejected)
    assert rejected.reason.startswith("images of other requests take ")
    bench.run_dry()
    first = bench.state.requests["first"]
    assert first.has_ended
    assert bool(first.submit.pixels) == has_journal
    assert not rejections("late", 2)
    bench.write_out()
    assert not first.submit.pixels


def test_an_ended_request_is_submitted_again(make_bench: MakeBench) -> None:
    """Its pixels are gone, and its digests are the same."""
    bench = serve(make_bench)
    request = ask("seen", (4, 4), 5, max_tokens=2)
    bench.say(request)
    bench.run_dry()
    assert not bench.state.requests["seen"].submit.pixels
    bench.take()
    answered = bench.say(request)
    assert not said(answered, Rejected)
    assert said(answered, Accepted)
    assert said(bench.say(ask("seen", (4, 4), 5, seed=9, max_tokens=2)), Rejected)


@pytest.mark.parametrize(("tokens", "tiles", "patches"), [(1, 1, 4), (64, 1, 256), (65, 2, 132), (4096, 64, 256)])
def test_tiles_are_of_one_size_and_not_large(tokens: int, tiles: int, patches: int) -> None:
    assert (VISION.num_tiles(tokens), VISION.part_patches(tokens)) == (tiles, patches)
    assert VISION.num_parts(tokens) == tiles * (VISION.depth + 1)


def test_an_image_of_the_same_pixels_in_another_shape_shares_nothing(make_bench: MakeBench) -> None:
    bench = serve(make_bench)
    for name, shape in (("wide", (4, 64)), ("square", (16, 16)), ("again", (16, 16))):
        bench.say(ask(name, 5, shape, 90, max_tokens=2, ignore_eos=True))
        parts = [each for step in run(bench) for each in step.image_parts or () if each.stop]
        shapes = {(each.image.rows, each.image.columns) for each in parts}
        cached = bench.sequence(name).num_cached
        assert (shapes, cached) == ((set(), 320) if name == "again" else ({shape}, 0)), name


def test_a_digest_of_the_pixels_alone_is_refused(make_bench: MakeBench) -> None:
    """Another shape of the same pixels would take this one's keys and values."""
    bench, request = serve(make_bench), ask("a", 5, (4, 4), 9)
    (image,) = request.params.images
    false = msgspec.structs.replace(image, digest=image_digest(2, 8, request.pixels[0]))
    params = msgspec.structs.replace(request.params, images=(false,))
    bench.say(msgspec.structs.replace(request, params=params))
    assert "not that of its rows, columns and pixels" in str(bench.take())


def test_a_larger_image_than_any_is_refused(make_bench: MakeBench) -> None:
    """The first stage has no memory for the work on it."""
    bench = serve(make_bench)
    bench.say(ask("a", 5, (65, 64), 9))
    assert "image 1 has 65 × 64 tokens, an image may have 4096" in str(bench.take())
