"""Console for tables that never breaks a word, because an id that is broken over two lines can't be copied.

A table that is too wide for the window is printed wider, like lines of ``ps``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column, Table


class TableConsole(Console):
    """A rich console whose tables never break words."""

    def print(self, *objects: Any, crop: bool = False, **options: Any) -> None:
        super().print(*objects, crop=crop, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Table):
            for column in renderable.columns:
                # In a dense table, rich assumes one character that the column does not have.
                column.min_width = self._longest_word(column) + renderable.collapse_padding
        return super().render(renderable, options)

    def _longest_word(self, column: Column) -> int:
        anywhere = self.options.update(max_width=1 << 16)
        cells = (column.header, *column.cells)
        return max(Measurement.get(self, anywhere, cell).minimum for cell in cells)
