"""Images of the fake model (``swarm.testing``): they change the input of layers at their positions, and the rotary
positions of all tokens behind their beginnings.

The first stage keeps features as ``ImageEncoder`` does, and needs pixels when that one needs them. Pixels that are not
those of their digest are refused: the real encoder would compute another image.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from swarm.errors import IllegalMove
from swarm.params import ImageSpan, image_digest
from swarm.stage.executor import Batch
from swarm.wire.messages import MAX_FEATURE_TOKENS, ImageParts, LayerRange, Vision

# Sixteen tokens make a tile, so that images of a few tokens have several.
FAKE_VISION = Vision(
    token=96,
    begin=95,
    end=94,
    patch=1,
    merge=4,
    least=16,
    most=1 << 20,
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
    num_layers=2,
    depth=3,
)

Sight = tuple[int, int]  # of a position: what its rotary positions change in every layer, and its image in the first
NO_SIGHT: Sight = (0, 0)


def fake_image(start: int, rows: int, columns: int, colour: int) -> tuple[ImageSpan, bytes]:
    """Return an image of one colour in a prompt, and its pixels."""
    pixels = bytes([colour]) * (rows * columns * FAKE_VISION.token_bytes)
    return ImageSpan(start, rows, columns, image_digest(rows, columns, pixels)), pixels


def fake_sight(images: Sequence[ImageSpan], position: int) -> Sight:
    """Return what a prompt's images change at a position."""
    shift = 0  # of the rotary positions, by the images before
    for image in images:
        if position < image.start:
            break
        if position < image.stop:
            offset = position - image.start
            row, column = divmod(offset, image.columns)
            first = shift + offset
            place = first | (first - row) << 16 | (first - column) << 32
            return place, 1 + crc32(str(offset).encode(), int(image.digest[:8], 16))
        shift += image.num_tokens - max(image.rows, image.columns)
    return shift | shift << 16 | shift << 32, 0


def see(layer: int, hidden: int, sight: Sight) -> int:
    """Return a layer's input at a position with what images change there."""
    place, feature = sight
    return hidden + place + (feature << layer if layer < FAKE_VISION.num_layers else 0)


@dataclass(slots=True)
class FakeImages:
    """Images that a fake executor has computed. Both fields change as those of ``ImageEncoder``."""

    room: int = MAX_FEATURE_TOKENS  # tokens of all images that are kept
    kept: OrderedDict[str, int] = field(default_factory=OrderedDict)  # digest -> tokens; the longest unused first
    work: tuple[str, int] | None = None  # digest of the image that is computed in part, and the number of parts

    def start_epoch(self, *, has_tower: bool) -> None:
        self.work = None
        if not has_tower:
            self.kept.clear()

    def clear(self) -> None:
        self.kept.clear()
        self.work = None

    def advance(self, vision: Vision, parts: Sequence[ImageParts], pixels: Mapping[str, bytes]) -> None:
        """Compute parts of images, except for those that are computed already, or whose beginning is missing."""
        for order in parts:
            digest = order.image.digest
            if order.stop == 0:
                self._drop(digest)
            elif digest in self.kept:
                self.kept.move_to_end(digest)
            elif self._is_at_work(digest) or digest in pixels:
                done = self._start(order.image, pixels)
                self._compute(vision, order.image, done, min(order.stop - done, order.stop - order.first))

    def find(self, vision: Vision, image: ImageSpan, pixels: Mapping[str, bytes]) -> None:
        """Compute what is missing of an image. Raises ``IllegalMove`` if that needs pixels that did not come."""
        if image.digest not in self.kept:
            if image.digest not in pixels and not self._is_at_work(image.digest):
                raise IllegalMove(f"the pixels of image {image.digest} are missing")
            done = self._start(image, pixels)
            self._compute(vision, image, done, vision.num_parts(image.num_tokens))
        self.kept.move_to_end(image.digest)

    def sights(self, vision: Vision | None, batch: Batch, number: int, layers: LayerRange) -> list[Sight]:
        """Return what images change at each position of a row; empty if its sequence has none. The first stage computes
        those that it has not kept."""
        images, row = batch.images[number] if batch.images else (), batch.rows[number]
        if not images:
            return []
        if vision is None:
            raise IllegalMove("the model reads text only, and images came")
        stop = row.start + row.count
        for image in images:
            if image.overlaps(row.start, stop) and layers.first == 0:
                self.find(vision, image, batch.pixels)
            elif image.overlaps(row.start, stop) and layers.first < vision.num_layers:
                raise IllegalMove(f"only a first stage has features of images, which layer {layers.first} needs")
        return [fake_sight(images, position) for position in range(row.start, stop)]

    def _is_at_work(self, digest: str) -> bool:
        return self.work is not None and self.work[0] == digest

    def _start(self, image: ImageSpan, pixels: Mapping[str, bytes]) -> int:
        """Return the number of parts of an image that are computed. Begin with the image if it is none yet."""
        if self.work is not None and self.work[0] == image.digest:
            return self.work[1]
        if image_digest(image.rows, image.columns, pixels[image.digest]) != image.digest:
            raise IllegalMove(f"pixels of another image came as those of {image.digest}")
        return 0

    def _compute(self, vision: Vision, image: ImageSpan, done: int, num_parts: int) -> None:
        done += max(0, num_parts)
        if done < vision.num_parts(image.num_tokens):
            self.work = image.digest, done
            return
        self.work = None
        self.kept[image.digest] = image.num_tokens
        while len(self.kept) > 1 and sum(self.kept.values()) > self.room:
            self.kept.popitem(last=False)

    def _drop(self, digest: str) -> None:
        if self._is_at_work(digest):
            self.work = None
        if digest in self.kept:
            self.kept.move_to_end(digest, last=False)
