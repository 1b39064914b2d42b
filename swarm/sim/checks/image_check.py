"""Checks of images (I19): tokens of an image are computed from its own pixels, which are kept as long as a request
needs them, and no longer.

The fake executor refuses tokens of an image whose pixels did not come, and pixels of another one; an image changes the
tokens behind it. Here, each step must carry the pixels of its images, whether or not the first stage has kept what it
computed of them: the stage may have lost it. Their parts are ordered one after the other, and before their tokens.
"""

from __future__ import annotations

from collections.abc import Collection

from swarm.broker.state import State
from swarm.sim.checks.audit import Violation
from swarm.sim.checks.ledger import Ledger
from swarm.sim.views import WorkerView
from swarm.testing_images import FAKE_VISION
from swarm.wire.messages import NO_LINEAGE, Step


class ImageCheck:
    """Check of the steps that the broker sends, and of the pixels and images that processes keep."""

    def __init__(self) -> None:
        self._epoch = NO_LINEAGE, 0
        self._parts: dict[str, int] = {}  # by digest: parts ordered in this epoch, and not dropped since
        self.num_seen = 0  # positions of images in steps and replays
        self.num_seen_again = 0  # of these, those in replays

    def on_step(self, step: Step, state: State) -> None:
        if (state.lineage, step.epoch) != self._epoch:
            self._epoch = state.lineage, step.epoch
            self._parts.clear()
        pixels = {image.digest for image in step.pixels or ()}
        self._on_parts(step, pixels)
        for row in step.rows:
            sequence = state.sequences.get(row.sequence)
            stop = row.start + row.count
            for image in sequence.images if sequence is not None else ():
                if not image.overlaps(row.start, stop):
                    continue
                num_seen = min(stop, image.stop) - max(row.start, image.start)
                self.num_seen += num_seen
                self.num_seen_again += num_seen if step.replay else 0
                where = f"I19: step {step.step} has tokens of an image of sequence {row.sequence}"
                if image.digest not in pixels:
                    raise Violation(f"{where}, and not its pixels")
                num_parts = self._parts.get(image.digest, 0)
                if num_parts < FAKE_VISION.num_parts(image.num_tokens):
                    raise Violation(f"{where}, of which {num_parts} parts were ordered")

    def _on_parts(self, step: Step, pixels: set[str]) -> None:
        for parts in step.image_parts or ():
            digest = parts.image.digest
            if parts.stop == 0:
                self._parts.pop(digest, None)
                continue
            where = f"I19: step {step.step} has parts {parts.first} to {parts.stop} of an image"
            if parts.first != self._parts.get(digest, 0):
                raise Violation(f"{where}, of which {self._parts.get(digest, 0)} were ordered before")
            if parts.first == 0 and digest not in pixels:
                raise Violation(f"{where}, and not its pixels")
            self._parts[digest] = parts.stop

    def on_passed_on(self, step: Step) -> None:
        """Check that a stage passes no images on to the next one."""
        if step.pixels or step.image_parts:
            raise Violation(f"I19: step {step.step} goes to a later stage with pixels or parts of images")

    def check_pixels(self, state: State) -> None:
        """Check that the broker has the pixels of all requests that it may compute, and of no others."""
        for request in state.requests.values():
            submit = request.submit
            if not request.has_ended and len(submit.pixels) != len(submit.params.images):
                raise Violation(f"I19: {request.id} has not ended, and its pixels are gone")
            if request.is_end_written and submit.pixels:
                raise Violation(f"I19: the broker keeps the pixels of {request.id}, whose end is written")

    def check_end(self, state: State, workers: Collection[WorkerView], ledger: Ledger) -> None:
        """Check that nothing of images is left but features within the room that first stages have for them."""
        self.check_pixels(state)
        kept = [name for name, request in ledger.requests.items() if request.ended_at and request.submit.pixels]
        if kept:
            raise Violation(f"I19: the journal keeps the pixels of {kept}, which have ended")
        if state.images.begun is not None or state.images.ready:
            raise Violation(f"I19: at the end the broker counts on {state.images}")
        members = () if state.plans.current is None else state.plans.current.members
        for node in workers:
            images = node.executor.images
            # A worker that the last plan left out keeps its work until it has a plan again.
            if images.work is not None and node.incarnation in members:
                raise Violation(f"I19: at the end {node.incarnation} is at work on {images.work}")
            if len(images.kept) > 1 and sum(images.kept.values()) > images.room:
                raise Violation(f"I19: {node.incarnation} keeps {images.kept}, the room is {images.room}")
