"""Images of a batch: their features by the vision tower, the tokens that get them, and rotary positions.

The features of the last images are kept, since a prompt's chunks share an image. They can be computed again at any
time: a batch carries the pixels of every image of which it has tokens.

A token of an image has three rotary positions: those of its image, its row and its column. The text behind an image
goes on after the largest of them. All are known from the images' places in the prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from swarm.errors import IllegalMove
from swarm.stage.executor import FenceRaised
from swarm.stage.model.vision_tower import ImageFeatures, ImageRows, ImageWork, VisionTower
from swarm.wire.messages import MAX_FEATURE_TOKENS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from swarm.params import ImageSpan
    from swarm.stage.executor import Batch
    from swarm.wire.messages import ImageParts

MANY_PATCHES = 1 << 10  # of an image: enough for all threads


def rotary_positions(images: Sequence[ImageSpan], start: int, count: int) -> NDArray[np.int64]:
    """Return the rotary positions of ``count`` tokens from ``start`` on, ``[3, count]``."""
    stop = start + count
    positions = np.tile(np.arange(start, stop), (3, 1))
    for image in images:
        behind = max(start, min(stop, image.stop))
        positions[:, behind - start :] -= image.num_tokens - max(image.rows, image.columns)
        first, last = max(start, image.start), behind
        if first < last:
            offsets = np.arange(first, last) - image.start
            begin = positions[0, first - start] - offsets[0]
            positions[:, first - start : last - start] = begin
            positions[1, first - start : last - start] += offsets // image.columns
            positions[2, first - start : last - start] += offsets % image.columns
    return positions


class ImageEncoder:
    """Computes the features of images, and keeps those of the last ones.

    One image may be computed in part (``advance``): the broker orders all parts of one before those of the next.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, ImageFeatures] = OrderedDict()  # by digest; the longest unused first
        self._work: ImageWork | None = None

    def clear(self) -> None:
        self._kept.clear()
        self._work = None

    def start_epoch(self, tower: VisionTower | None) -> None:
        """Drop what belongs to the plan before: the work on an image, and all features if there is no tower now. The
        work holds its tower."""
        self._work = None
        if tower is None:
            self._kept.clear()

    def advance(
        self,
        tower: VisionTower,
        parts: Sequence[ImageParts],
        pixels: Mapping[str, bytes],
        is_fenced: Callable[[], bool],
        on_progress: Callable[[], None],
    ) -> None:
        """Compute parts of images. Parts that are computed already are skipped, and so are those of an image whose
        beginning is missing: ``find_rows`` computes the rest."""
        for order in parts:
            digest = order.image.digest
            if order.stop == 0:
                self._drop(digest)
            elif digest in self._kept:
                self._kept.move_to_end(digest)
            elif self._is_at_work(digest) or digest in pixels:
                work = self._start(tower, order.image, pixels)
                self._compute(work, min(order.stop - work.num_done, order.stop - order.first), is_fenced, on_progress)

    def find_rows(
        self,
        tower: VisionTower,
        batch: Batch,
        is_fenced: Callable[[], bool] = lambda: False,
        on_progress: Callable[[], None] = lambda: None,
    ) -> ImageRows | None:
        """Return the tokens of a batch that belong to images, with their features; None if there are none. Raises
        ``IllegalMove`` if the pixels of an image are missing."""
        rows: list[torch.Tensor] = []
        features: list[tuple[ImageFeatures, slice]] = []
        for offset, image, part in _parts(batch):
            rows.append(torch.arange(offset, offset + part.stop - part.start))
            features.append((self._find(tower, image, batch.pixels, is_fenced, on_progress), part))
        return ImageRows.join(rows, features) if rows else None

    def _find(
        self,
        tower: VisionTower,
        image: ImageSpan,
        pixels: Mapping[str, bytes],
        is_fenced: Callable[[], bool],
        on_progress: Callable[[], None],
    ) -> ImageFeatures:
        features = self._kept.get(image.digest)
        if features is None:
            if image.digest not in pixels and not self._is_at_work(image.digest):
                raise IllegalMove(f"the pixels of image {image.digest} are missing")
            work = self._start(tower, image, pixels)
            self._compute(work, work.num_parts, is_fenced, on_progress)
            features = self._kept[image.digest]
        self._kept.move_to_end(image.digest)
        return features

    def _is_at_work(self, digest: str) -> bool:
        return self._work is not None and self._work.digest == digest

    def _start(self, tower: VisionTower, image: ImageSpan, pixels: Mapping[str, bytes]) -> ImageWork:
        """Return the work on an image, which goes on where it was left."""
        if self._work is None or self._work.digest != image.digest:
            self._work = None  # frees its memory before the next one takes more
            self._work = ImageWork(tower, image, pixels[image.digest])
        return self._work

    def _compute(
        self, work: ImageWork, num_parts: int, is_fenced: Callable[[], bool], on_progress: Callable[[], None]
    ) -> None:
        """Compute up to this number of further parts. Keep the features if they were the last ones."""
        self._work = None  # an error in a part leaves the work unusable
        for _ in range(min(num_parts, work.num_parts - work.num_done)):
            if is_fenced():
                self._work = work
                raise FenceRaised
            work.compute_part()
            on_progress()
        if not work.is_done:
            self._work = work
            return
        self._kept[work.digest] = work.features()
        while len(self._kept) > 1 and sum(len(each.embeddings) for each in self._kept.values()) > MAX_FEATURE_TOKENS:
            self._kept.popitem(last=False)

    def _drop(self, digest: str) -> None:
        """Drop the work on an image that no step needs. Its features go first when memory is short."""
        if self._is_at_work(digest):
            self._work = None
        if digest in self._kept:
            self._kept.move_to_end(digest, last=False)


def _parts(batch: Batch) -> Iterator[tuple[int, ImageSpan, slice]]:
    """Yield each run of a batch's tokens that belongs to an image: its first token, the image, and which of the image's
    tokens they are."""
    offset = 0
    for row, images in zip(batch.rows, batch.images, strict=bool(batch.images)):
        for image in images:
            if image.overlaps(row.start, row.start + row.count):
                first, stop = max(row.start, image.start), min(row.start + row.count, image.stop)
                yield offset + first - row.start, image, slice(first - image.start, stop - image.start)
        offset += row.count
