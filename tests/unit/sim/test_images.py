"""Images in whole swarms with accidents: each request has the tokens of its own images, and nothing of them is left
behind it."""

from __future__ import annotations

import pytest

from swarm.broker.recovery import rebuild
from swarm.broker.requests import tokens
from swarm.broker.state import Request, Sequence, prefix
from swarm.broker.state.images import ImageState
from swarm.broker.steps import images as image_steps
from swarm.broker.steps import scheduler
from swarm.errors import IllegalMove
from swarm.sim.run import run
from swarm.stage import kv_spill
from swarm.stage.sequences import SequenceStore
from swarm.testing_images import FAKE_VISION, FakeImages, fake_image, fake_sight
from swarm.wire.messages import ImageParts
from tests.unit.sim.groups import NUM, in_groups, with_and_without_disks


@in_groups
@with_and_without_disks
def test_accidents_beside_images(first_seed: int, spills: bool) -> None:
    """Prompts begin alike with unlike images, are cut in the middle of one, and processes die."""
    played = [run(seed, images=True, spills=spills) for seed in range(first_seed, first_seed + NUM)]
    assert [(o.seed, o.failure) for o in played if o.failure] == []
    assert sum(o.num_seen for o in played) > 50 * NUM
    least = 0 if spills else 2 * NUM  # positions that are read from disk are not replayed
    assert sum(o.num_seen_again for o in played) > least


# --- broken rules ----------------------------------------------------------------------------------------------------


def _prefixes_mixed(patch: pytest.MonkeyPatch) -> None:
    """Prompts that begin alike share positions, whatever their images."""
    patch.setattr(prefix, "image_content", lambda images, start, stop: b"")


def _names_mixed(patch: pytest.MonkeyPatch) -> None:
    """Files of keys and values are named by tokens alone."""
    patch.setattr(kv_spill, "image_content", lambda images, start, stop: b"")


def _images_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A stage computes rows without their images."""
    patch.setattr(SequenceStore, "images", lambda self, rows: ())


def _not_sent(patch: pytest.MonkeyPatch) -> None:
    """Tokens of an image come without its pixels: the first stage has kept it."""
    patch.setattr(Sequence, "pixels", lambda self, start, stop: {})


def _not_sent_again(patch: pytest.MonkeyPatch) -> None:
    """A replay has no pixels: they came before."""
    patch.setattr(rebuild, "image_pixels", lambda pixels: ())


def _others_sent(patch: pytest.MonkeyPatch) -> None:
    """Pixels of an image come under the digest of another one."""
    of_these = Sequence.pixels

    def pixels(self: Sequence, start: int, stop: int) -> dict[str, bytes]:
        return dict.fromkeys(of_these(self, start, stop), self.request.submit.pixels[0]) if self.images else {}

    patch.setattr(Sequence, "pixels", pixels)


def _tokens_first(patch: pytest.MonkeyPatch) -> None:
    """Tokens of an image join a step before its parts."""
    patch.setattr(scheduler, "num_seen", lambda state, sequence, count: count)


def _never_ready(patch: pytest.MonkeyPatch) -> None:
    """An image that no step needs stays in the broker's list, as does that of a plan before."""
    patch.setattr(image_steps, "take_dropped", lambda state: [])
    patch.setattr(ImageState, "clear", lambda self: None)


def _dropped_early(patch: pytest.MonkeyPatch) -> None:
    """The pixels of a request go with the first of its continuations."""
    mark = Sequence.mark_end_written

    def mark_and_drop(self: Sequence) -> None:
        mark(self)
        self.request.drop_pixels()

    patch.setattr(Sequence, "mark_end_written", mark_and_drop)


def _held(patch: pytest.MonkeyPatch) -> None:
    """The broker keeps pixels as long as the request."""
    patch.setattr(Request, "drop_pixels", lambda self: None)


def _kept_in_the_journal(patch: pytest.MonkeyPatch) -> None:
    """The journal keeps the pixels of ended requests."""
    end = tokens.WriteEnd
    patch.setattr(tokens, "WriteEnd", lambda *fields: end(*fields[:-1], has_pixels=False))


@pytest.mark.parametrize(
    ("sabotage", "first_seed", "noticed"),
    [
        (_prefixes_mixed, 10, "I"),
        (_names_mixed, 8, "I"),
        (_images_forgotten, 0, "I"),
        (_not_sent, 0, "I19"),
        (_not_sent_again, 10, "I19"),
        (_others_sent, 0, "pixels of another image"),
        (_tokens_first, 0, "I19"),
        (_never_ready, 11, "I19"),
        (_dropped_early, 5, "a core broke"),
        (_held, 2, "I19"),
        (_kept_in_the_journal, 0, "I19"),
    ],
)
def test_a_broken_rule_of_images_is_noticed(
    sabotage: object, first_seed: int, noticed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)  # type: ignore[operator]
    seeds, spills = range(first_seed, first_seed + NUM), sabotage is _names_mixed
    failures = (run(seed, images=True, spills=spills).failure for seed in seeds)
    assert noticed in next((failure for failure in failures if failure is not None), "nothing")


# --- the fake model --------------------------------------------------------------------------------------------------


def test_images_change_their_positions_and_those_behind_them() -> None:
    """By their content, by their place, and by their shape even behind them."""
    (red, _), (blue, _), (turned, _) = fake_image(4, 2, 3, 1), fake_image(4, 2, 3, 2), fake_image(4, 3, 2, 1)
    (flat, _) = fake_image(4, 1, 6, 1)
    before, behind = [[fake_sight((i,), at) for i in (red, blue, turned, flat)] for at in (3, 10)]
    assert before == [(0, 0)] * 4
    assert behind[0] == behind[1] == behind[2] != behind[3]
    inside = [fake_sight((image,), at) for image in (red, blue, turned) for at in range(4, 10)]
    assert len({feature for _, feature in inside}) == len(inside)


def test_a_first_stage_needs_pixels_that_it_has_not_kept() -> None:
    (red, pixels), (blue, _) = fake_image(0, 4, 5, 1), fake_image(0, 4, 5, 2)
    images, num_parts = FakeImages(room=30), FAKE_VISION.num_parts(20)
    with pytest.raises(IllegalMove, match="are missing"):
        images.find(FAKE_VISION, red, {})
    with pytest.raises(IllegalMove, match="of another image"):
        images.find(FAKE_VISION, blue, {blue.digest: pixels})
    images.advance(FAKE_VISION, [ImageParts(1, red, 0, 3)], {red.digest: pixels})
    assert images.work == (red.digest, 3)
    images.advance(FAKE_VISION, [ImageParts(1, red, 3, num_parts)], {})
    images.find(FAKE_VISION, red, {})
    images.find(FAKE_VISION, blue, {blue.digest: fake_image(0, 4, 5, 2)[1]})
    with pytest.raises(IllegalMove, match="are missing"):
        images.find(FAKE_VISION, red, {})
