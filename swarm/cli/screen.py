"""Where tables are drawn: like any console of rich's, but no word of a table is broken. One that the window has no room
for is wider than it, as lines of ``ps`` are: an id that is broken can't be copied."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column, Table


class Screen(Console):
    def print(self, *objects: Any, crop: bool = False, **options: Any) -> None:
        super().print(*objects, crop=crop, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Table):
            for column in renderable.columns:
                # In a dense table rich takes a character for granted that it has not.
                column.min_width = self._longest_word(column) + renderable.collapse_padding
        return super().render(renderable, options)

    def _longest_word(self, column: Column) -> int:
        anywhere = self.options.update(max_width=1 << 16)
        cells = (column.header, *column.cells)
        return max(Measurement.get(self, anywhere, cell).minimum for cell in cells)
