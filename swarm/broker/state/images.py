"""Images that the first stage computes for coming steps, under the plan in force (``steps.images``)."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.wire.messages import MAX_FEATURE_TOKENS, ImageParts

_WEIGHT = 0.25  # of the newest step in the average time


@dataclass(slots=True)
class ImageState:
    """Progress of the vision tower's work. One image at a time is computed in part."""

    begun: ImageParts | None = None  # all parts so far of the image that is computed in part
    ready: dict[str, int] = field(default_factory=dict)  # by digest: the step with the last part of the image's work
    dropped: list[ImageParts] = field(default_factory=list)  # images that no step needs: the next step reports it
    room: int = MAX_FEATURE_TOKENS  # tokens of all images that the first stage keeps
    patch_s: float = 0.0  # time of a patch in a layer of the tower: moving average; 0: not measured yet

    def clear(self) -> None:
        """Forget all progress at a new epoch, whose first stage may be another worker."""
        self.begun = None
        self.ready.clear()
        self.dropped.clear()

    def record_time(self, num_patches: int, seconds: float) -> None:
        """Record the time that a step's parts have taken beyond its tokens."""
        patch_s = max(0.0, seconds) / num_patches
        self.patch_s += (_WEIGHT if self.patch_s else 1.0) * (patch_s - self.patch_s)
