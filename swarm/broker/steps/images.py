"""Which parts of the vision tower's work a step has, and which images' tokens may join it.

A large image takes the first stage far longer than a step. So its work is cut into parts (``wire.Vision``), and each
step has some of them besides its tokens. While answers are running, the parts of a step take no longer than the rest of
it, as far as measured, but at least one part is computed. Tokens of an image join a step once all of its parts are in
that step or an earlier one; so does a replay, once that step is done.

The first stage keeps what it has computed, which takes memory. So the next image is begun only if the features of those
that steps still need leave room. The order is that of the prompts; images of prompts that come later may be dropped,
and are computed again. Those of suspects come last, except for the suspect whose turn is next (``scheduler``). Nothing
but time depends on any of this: a stage that lacks an image computes it from the pixels that come with its tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from swarm.broker.state import Sequence, SequenceState, State
from swarm.params import ImageSpan
from swarm.wire.messages import PART_PATCHES, ImageParts

MAX_PATCHES = 16 * PART_PATCHES  # of a step, so that a sequence that arrives meanwhile does not wait for long


@dataclass(slots=True)
class ImageChoice:
    """Parts of images in a step."""

    parts: list[ImageParts] = field(default_factory=list)
    pixels: dict[str, bytes] = field(default_factory=dict)  # of the images whose work begins, by digest
    num_patches: int = 0  # of all parts, each layer counted

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences to whose images the parts belong."""
        return tuple(parts.sequence for parts in self.parts)


def choose_parts(
    state: State,
    target_s: float,
    num_decodes: int,
    eligible: Collection[Sequence] | None = None,
    postponed: Collection[Sequence] = (),
) -> ImageChoice:
    """Return the parts for a step with this number of decodes, and record them as sent. ``target_s``: time that a step
    should take, 0 if there is no limit. ``eligible``: the sequences whose images may join the step, if suspects are
    kept apart from others. ``postponed``: suspects whose turn comes after that of another one."""
    vision, choice = None if state.manifest is None else state.manifest.vision, ImageChoice()
    if vision is None:
        return choice
    wanted = _find_wanted(state, eligible, postponed)  # and drop others, even if none may join
    budget = _patch_budget(state, target_s, num_decodes)
    for sequence, image in wanted:
        if eligible is not None and sequence not in eligible:
            break  # the next one waits for it
        begun = state.images.begun
        first = 0 if begun is None else begun.stop
        num_parts, patches = vision.num_parts(image.num_tokens), vision.part_patches(image.num_tokens)
        count = min(num_parts - first, budget // patches if choice.parts else max(1, budget // patches))
        if count <= 0:
            break
        choice.parts.append(ImageParts(sequence.id, image, first, first + count))
        choice.num_patches += count * patches
        budget -= count * patches
        if first == 0:
            choice.pixels |= sequence.pixels(image.start, image.stop)
        if first + count < num_parts:
            state.images.begun = ImageParts(sequence.id, image, 0, first + count)
            break
        state.images.begun = None
        state.images.ready[image.digest] = state.next_step
    return choice


def take_dropped(state: State) -> list[ImageParts]:
    """Return the images to be reported to the first stage as needed no longer."""
    dropped, state.images.dropped = state.images.dropped, []
    return dropped


def num_seen(state: State, sequence: Sequence, count: int) -> int:
    """Return how many of a sequence's next ``count`` tokens may join the step: those before the first image that is not
    computed."""
    start = sequence.scheduled
    for image in sequence.images:
        if image.overlaps(start, start + count) and image.digest not in state.images.ready:
            return max(0, image.start - start)
    return count


def replay_stop(state: State, sequence: Sequence) -> int:
    """Return the position at which a sequence's next chunk of a replay ends: before an image for whose features there
    would be no room beside those of the images before it."""
    run, num_tokens = sequence.rebuilds[0], 0
    stop = min(run.stop, run.done + state.rebuilding.chunk_positions)
    for image in sequence.images if run.source is None else ():
        if image.overlaps(run.done, stop):
            if num_tokens and num_tokens + image.num_tokens > state.images.room:
                return image.start
            num_tokens += image.num_tokens
    return stop


def awaits_images(state: State, sequence: Sequence) -> bool:
    """Whether a sequence's next replay is from tokens of which some belong to images that are not computed yet."""
    return any(
        image.digest not in state.images.ready or state.images.ready[image.digest] in state.in_flight
        for image in _next_images(state, sequence)
    )


def lacking_images(state: State) -> list[Sequence]:
    """Return the sequences whose next replay has tokens of images that no step has computed."""
    ready = state.images.ready
    return [s for s in _rebuilt(state) if any(image.digest not in ready for image in _next_images(state, s))]


def _find_wanted(
    state: State, eligible: Collection[Sequence] | None, postponed: Collection[Sequence]
) -> list[tuple[Sequence, ImageSpan]]:
    """Return the images to be computed, the one that is computed in part first, those of postponed sequences last.
    Those that no sequence needs, or for whose features there is no room, are dropped."""
    images, prompts = state.images, [s for s in (*_rebuilt(state), *state.running.prefilling) if s.images]
    prompts.sort(key=lambda sequence: sequence in postponed)
    missing = [(s, image) for s in prompts for image in _next_images(state, s) if image.digest not in images.ready]
    if images.begun is not None:
        digest = images.begun.image.digest
        owner = next((pair for pair in missing if pair[1].digest == digest), None)
        if owner is None or _gives_way(state, owner[0], missing, eligible):
            _drop(state, images.begun)
    room: dict[str, int] = {}
    wanted: list[tuple[Sequence, ImageSpan]] = []
    if images.begun is not None and owner is not None:
        wanted.append(owner)
        room[owner[1].digest] = owner[1].num_tokens
    for sequence in prompts:
        for image in _next_images(state, sequence):
            if image.digest in room:
                continue
            if room and sum(room.values()) + image.num_tokens > state.images.room:
                break
            room[image.digest] = image.num_tokens
            if image.digest not in images.ready:
                wanted.append((sequence, image))
    for digest in [digest for digest in images.ready if digest not in room]:
        del images.ready[digest]
        images.dropped.append(ImageParts(0, ImageSpan(0, 1, 1, digest), 0, 0))
    return wanted


def _gives_way(
    state: State,
    owner: Sequence,
    missing: list[tuple[Sequence, ImageSpan]],
    eligible: Collection[Sequence] | None,
) -> bool:
    """Whether an image is dropped for that of the suspect whose turn it is: others may wait for that one."""
    if eligible is None or owner in eligible:
        return False
    suspects = state.evidence.suspects
    return owner.id in suspects and any(s in eligible and s.id in suspects for s, _ in missing)


def _drop(state: State, parts: ImageParts) -> None:
    state.images.begun = None
    state.images.dropped.append(ImageParts(parts.sequence, parts.image, 0, 0))


def _rebuilt(state: State) -> Iterator[Sequence]:
    """Yield the sequences whose layers are rebuilt, in their order. Those that wait for another one's prefix are left
    out: their images must not take the room that the other one needs."""
    for sequence in (*state.rebuilding.in_progress, *state.rebuilding.queue):
        if sequence.state is SequenceState.RUNNING and sequence.rebuilds and not state.prefixes.is_blocked(sequence):
            yield sequence


def _next_images(state: State, sequence: Sequence) -> Iterator[ImageSpan]:
    """Yield the images of which a sequence's next steps or replays have tokens, in their order."""
    if sequence.rebuilds:
        run = sequence.rebuilds[0]
        stop = replay_stop(state, sequence)
        if run.source is None:
            yield from (image for image in sequence.images if image.overlaps(run.done, stop))
    else:
        yield from (image for image in sequence.images if image.stop > sequence.scheduled)


def _patch_budget(state: State, target_s: float, num_decodes: int) -> int:
    """Return the number of patches, each layer counted, that a step should have at most."""
    patch_s, step_s = state.images.patch_s, state.costs.expected_s(max(1, num_decodes))
    if len(state.running) == state.running.num_prefilling:  # no answer is running
        return MAX_PATCHES
    if not patch_s or step_s is None:
        return PART_PATCHES
    return min(MAX_PATCHES, int((max(0.0, target_s - step_s) if target_s else step_s) / patch_s))
