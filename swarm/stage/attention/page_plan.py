"""What attention over a pool's pages does in one pass: computed once, and used by every layer.

Rows are the query heads of a key head, times tokens. A tile has up to 64 rows, of consecutive tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from swarm.stage.attention.guesses import Guesses
from swarm.stage.attention.pages import PAGE

if TYPE_CHECKING:
    from swarm.stage.attention.grid import Span


@dataclass(frozen=True, slots=True)
class PageTables:
    """Block tables of a batch, and the place of each token. All tensors are int32, on the device."""

    pages: torch.Tensor  # numbers of pages ``[spans, pages]``
    token_pages: torch.Tensor  # number of each token's page
    token_places: torch.Tensor  # position of each token in its page


@dataclass(frozen=True, slots=True)
class PageTiles:
    """Tiles of a batch, as int32 tensors on the device."""

    offsets: torch.Tensor  # of a tile's first token, in the batch
    starts: torch.Tensor  # position of the first token
    counts: torch.Tensor  # tokens of the tile
    tables: torch.Tensor  # row of the block tables
    last: int  # largest position of the batch


@dataclass(slots=True)
class PagePlan:
    """A pass's rows, and the pages of their sequences."""

    spans: tuple[Span, ...]
    pages: tuple[list[int], ...]  # block table of each span's sequence
    device: torch.device
    guesses: Guesses | None  # the tokens that are proposals; None without any
    _tables: PageTables | None = None
    _tiles: dict[int, PageTiles] = field(default_factory=dict)  # by most tokens of a tile

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(span.sequence for span in self.spans)

    @property
    def tables(self) -> PageTables:
        """Return the block tables for kernels."""
        if self._tables is None:
            self._tables = self._make_tables()
        return self._tables

    def _make_tables(self) -> PageTables:
        width = max(len(pages) for pages in self.pages)
        table = torch.tensor([[*pages, *[0] * (width - len(pages))] for pages in self.pages], dtype=torch.int32)
        positions = torch.cat([torch.arange(span.start, span.start + span.count) for span in self.spans])
        rows = torch.repeat_interleave(torch.tensor([span.count for span in self.spans]))
        own = table[rows, positions // PAGE]
        flat = torch.cat((table.flatten(), own, (positions % PAGE).int())).to(self.device)
        num = table.numel()
        return PageTables(flat[:num].view_as(table), flat[num : num + len(own)], flat[num + len(own) :])

    def tiles(self, most_tokens: int) -> PageTiles:
        """Return the tiles of the batch, of up to this many tokens."""
        if most_tokens not in self._tiles:
            cuts = [cut for row, span in enumerate(self.spans) for cut in _cut(span, row, most_tokens)]
            offsets, starts, counts, tables = torch.tensor(cuts, dtype=torch.int32).T.contiguous().to(self.device)
            last = max(span.start + span.count for span in self.spans) - 1
            self._tiles[most_tokens] = PageTiles(offsets, starts, counts, tables, last)
        return self._tiles[most_tokens]


def _cut(span: Span, row: int, most_tokens: int) -> Sequence[tuple[int, int, int, int]]:
    """Cut a span at multiples of ``most_tokens``: each tile's offset, start, count and row of the block tables."""
    stop = span.start + span.count
    starts = [span.start, *range((span.start // most_tokens + 1) * most_tokens, stop, most_tokens)]
    ends = [*starts[1:], stop]
    return [
        (span.offset + start - span.start, start, end - start, row) for start, end in zip(starts, ends, strict=True)
    ]
