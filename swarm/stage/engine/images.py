"""Images of a batch: their features by the vision tower, the tokens that get them, and rotary positions.

The features of the last images are kept, since a prompt's chunks share an image. They can be computed again at any
time: a batch carries the pixels of every image of which it has tokens.

A token of an image has three rotary positions: those of its image, its row and its column. The text behind an image
goes on after the largest of them. All are known from the images' places in the prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from swarm.errors import IllegalMove
from swarm.stage.model.vision_tower import ImageFeatures, ImageRows, VisionTower

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from swarm.params import ImageSpan
    from swarm.stage.executor import Batch

MAX_KEPT_BYTES = 64 << 20
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
    """Computes the features of a batch's images, and keeps those of the last ones."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, ImageFeatures] = OrderedDict()  # by digest; the longest unused first

    def clear(self) -> None:
        self._kept.clear()

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
            features.append((self._encode(tower, image, batch, is_fenced, on_progress), part))
        return ImageRows.join(rows, features) if rows else None

    def _encode(
        self,
        tower: VisionTower,
        image: ImageSpan,
        batch: Batch,
        is_fenced: Callable[[], bool],
        on_progress: Callable[[], None],
    ) -> ImageFeatures:
        features = self._kept.get(image.digest)
        if features is None:
            if image.digest not in batch.pixels:
                raise IllegalMove(f"the pixels of image {image.digest} are missing")
            features = tower.encode(image, batch.pixels[image.digest], is_fenced, on_progress)
            self._kept[image.digest] = features
        self._kept.move_to_end(image.digest)
        while len(self._kept) > 1 and sum(each.num_bytes for each in self._kept.values()) > MAX_KEPT_BYTES:
            self._kept.popitem(last=False)
        return features


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
