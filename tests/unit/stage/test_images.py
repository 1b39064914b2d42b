"""Steps of the first stage that have parts of images beside their rows, or no rows at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarm.stage import actions as act
from swarm.testing_images import FAKE_VISION, fake_image
from swarm.wire.messages import ImageParts, ImagePixels
from tests.unit.stage.bench import StageBench, step_of

IMAGE, PIXELS = fake_image(1, 8, 8, 1)
NUM_PARTS = FAKE_VISION.num_parts(IMAGE.num_tokens)
WITH_PIXELS = (ImagePixels(IMAGE.digest, PIXELS),)


@pytest.fixture
def stage(make_stage: Callable[..., StageBench]) -> StageBench:
    """The first stage of two, active in epoch 1, of a model that reads images."""
    bench = make_stage(sees=True)
    bench.activate()
    return bench


def test_parts_of_images_are_computed_without_rows(stage: StageBench) -> None:
    """The tokens come in a later step, which then need not compute the whole image. The next stage gets no parts."""
    (compute,) = stage.step(step_of(1, image_parts=(ImageParts(1, IMAGE, 0, NUM_PARTS - 1),), pixels=WITH_PIXELS))
    assert isinstance(compute, act.Compute)
    assert compute.batch.rows == ()
    assert compute.batch.image_parts == (ImageParts(1, IMAGE, 0, NUM_PARTS - 1),)
    assert compute.batch.pixels == {IMAGE.digest: PIXELS}
    (sent,) = [action for action in stage.compute() if isinstance(action, act.SendStep)]
    assert (sent.step.step, sent.step.rows, sent.hidden) == (1, (), None)
    assert not sent.step.image_parts
    assert not sent.step.pixels
    assert stage.executor.images.work == (IMAGE.digest, NUM_PARTS - 1)
    stage.run(step_of(2, image_parts=(ImageParts(1, IMAGE, NUM_PARTS - 1, NUM_PARTS),)))
    assert stage.executor.images.work is None
    assert stage.executor.images.kept == {IMAGE.digest: IMAGE.num_tokens}


def test_an_image_is_dropped_by_a_step_without_rows(stage: StageBench) -> None:
    """Its work ends, so that its memory is free before the next image begins."""
    stage.run(step_of(1, image_parts=(ImageParts(1, IMAGE, 0, 1),), pixels=WITH_PIXELS))
    assert stage.executor.images.work == (IMAGE.digest, 1)
    stage.run(step_of(2, image_parts=(ImageParts(1, IMAGE, 0, 0),)))
    assert stage.executor.images.work is None
