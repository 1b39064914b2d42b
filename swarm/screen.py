"""Tables for people that fit the window. No name, address or number is cut or broken, so that it can be copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Final

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

_WHOLE: Final = 20  # Cells up to this width are not wrapped; longer ones are wrapped between words.
_UNLIMITED: Final = 1 << 16


class ReportConsole(Console):
    """A rich console that leaves words longer than the window to the terminal, which wraps them without a break."""

    def print(self, *objects: Any, crop: bool = False, **options: Any) -> None:
        super().print(*objects, crop=crop, **options)


class ReportTable(Table):
    """A table that omits columns if the window is too narrow, and becomes a list of records if that is not enough.

    ``optional``: headings of the columns that may be omitted, the first one first.
    """

    def __init__(self, *headers: Column | str, optional: Sequence[str] = (), **options: Any) -> None:
        super().__init__(*headers, **options)
        self._optional = tuple(optional)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [replace(column, width=self._measure(console, column).minimum) for column in self.columns]
        omitted: list[str] = []
        for heading in (None, *self._optional):
            kept = [column for column in columns if str(column.header) != heading]
            omitted += [str(heading)] if len(kept) < len(columns) else []
            columns = kept
            table = copy(self)
            table.columns = [replace(column, _index=index) for index, column in enumerate(columns)]
            spare = options.max_width - Measurement.get(console, options.update(max_width=_UNLIMITED), table).minimum
            if spare >= 0:
                self._widen(console, table.columns, spare)
                yield from super(ReportTable, table).__rich_console__(console, options)
                if omitted:
                    yield Text(f"omitted in this window: {', '.join(omitted)} (--json has them)")
                return
        yield from self._records(console, options.max_width)

    def _measure(self, console: Console, column: Column) -> Measurement:
        """Return the least width of a column, without broken words and short cells, and the width of all its text."""
        anywhere = console.options.update(max_width=_UNLIMITED)
        header = Measurement.get(console, anywhere, column.header)
        cells = [Measurement.get(console, anywhere, cell) for cell in column.cells]
        least = max(header.minimum, *(max(c.minimum, min(c.maximum, _WHOLE)) for c in cells), 0)
        most = max(header.maximum, *(c.maximum for c in cells), 0)
        # In a dense table, rich forgets the padding on the left of the first column.
        forgotten = self.padding[3] if self.collapse_padding and self.pad_edge and not column._index else 0
        return Measurement(least + forgotten, most + forgotten)

    def _widen(self, console: Console, columns: Sequence[Column], spare: int) -> None:
        """Use spare width for columns whose text would be wrapped, first for those that lack least."""
        lacks = [(self._measure(console, column).maximum - (column.width or 0), column) for column in columns]
        for lack, column in sorted(lacks, key=lambda pair: pair[0]):
            added = min(lack, spare)
            column.width, spare = (column.width or 0) + added, spare - added

    def _records(self, console: Console, width: int) -> Iterator[Text]:
        """Yield a line for each cell with its heading, and an empty line after each record."""
        if self.title:
            yield _line(str(self.title), width)
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            texts = [_text(console, cell) for cell in cells]
            if not self.show_header:
                yield _line(": ".join(filter(None, texts)), width)
                continue
            for column, text in zip(self.columns, texts, strict=True):
                if text:
                    yield _line(": ".join(filter(None, (_text(console, column.header), text))), width)
            yield Text()
        if self.caption:
            yield _line(str(self.caption), width)


def _text(console: Console, cell: RenderableType) -> str:
    return console.render_str(cell).plain if isinstance(cell, str) else str(cell)


def _line(text: str, width: int) -> Text:
    """Return a text that is wrapped between words, or by the terminal if a word is longer than the window."""
    has_long_word = any(len(word) > width for word in text.split())
    return Text(text, overflow="ignore" if has_long_word else "fold", no_wrap=has_long_word)
