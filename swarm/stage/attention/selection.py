"""Selection of the positions that queries attend to, by an index of positions.

A layer with an index computes queries and one key per position for the index alone. The key is stored in the row of
the position's latent, so it is moved, cut, shared and counted with it. A query that sees up to ``top_k`` positions
attends to all of them; any other one to the ``top_k`` whose scores are the largest, the earliest ones among equals.
A score that is not a number counts as the largest.

A selection must have the same bits whatever else is in the batch and however the prompt was split. On a CPU, a product
of a query and a key is therefore summed in an order of its own: by our own kernel, or element by element. The heads'
scores are added one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.grid import Span
from swarm.stage.attention.passes import ForwardPass
from swarm.stage.attention.racks import LayerBuffer, Rack
from swarm.stage.native.linears import NativeLinear

FindBuffer = Callable[[Rack], LayerBuffer]
ReadLatents = Callable[[Span], torch.Tensor]  # rows of a sequence's positions up to the span's end
# A position as two digits that are exact in every dtype: whole numbers from -256 to 255.
_BASE, _MIDDLE = 512, 256
MAX_POSITIONS = _BASE * _BASE  # of a selection that stages pass on
_MOST_SCORES = 1 << 24  # scores of heads that are computed at once


@dataclass(frozen=True, slots=True)
class Selection:
    """The tokens of a batch that see more positions than they attend to, as offsets, and the positions ``[tokens,
    top_k]`` that each one attends to, in ascending order."""

    tokens: torch.Tensor
    positions: torch.Tensor

    def hidden(self, tokens: torch.Tensor | slice, num_tokens: int, low: int, high: int) -> torch.Tensor | None:
        """Return which positions from ``low`` to ``high`` these tokens don't attend to: a mask ``[tokens, positions]``.

        None if there are none. ``num_tokens``: of the batch.
        """
        rows = torch.full((num_tokens,), -1, device=self.tokens.device)
        rows[self.tokens] = torch.arange(len(self.tokens), device=self.tokens.device)
        rows = rows[tokens]
        chosen = rows >= 0
        if not bool(chosen.any()):
            return None
        hidden = torch.zeros(len(rows), high, dtype=torch.bool, device=rows.device)
        hidden[chosen] = torch.ones_like(hidden[chosen]).scatter_(1, self.positions[rows[chosen]], False)
        return hidden[:, low:]

    def to_rows(self, num_tokens: int, top_k: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the selection as rows ``[num_tokens, 2 * top_k]``, which stages pass on. Other tokens' are zeros."""
        rows = torch.zeros(num_tokens, top_k, 2, dtype=dtype, device=self.positions.device)
        digits = self.positions // _BASE, self.positions % _BASE
        rows[self.tokens] = (torch.stack(digits, -1) - _MIDDLE).to(dtype)
        return rows.flatten(1)

    @classmethod
    def from_rows(cls, rows: torch.Tensor, positions: torch.Tensor) -> Selection | None:
        """Return the selection in rows of tokens at these positions. Rows that no selection was written to give any
        positions that their tokens see."""
        top_k = rows.shape[1] // 2
        tokens = (positions >= top_k).nonzero()[:, 0]
        if not len(tokens):
            return None
        digits = rows[tokens].float().nan_to_num(0.0).clamp(-_MIDDLE, _MIDDLE - 1).long() + _MIDDLE
        high, low = digits.view(-1, top_k, 2).unbind(-1)
        return cls(tokens, (high * _BASE + low).minimum(positions[tokens, None]))


@dataclass(slots=True)
class SelectedPositions:
    """What a batch's tokens attend to in a layer whose index an earlier layer has computed. Without a selection, every
    token attends to all positions that it sees, which are up to ``top_k``."""

    top_k: int
    selection: Selection | None


@dataclass(slots=True)
class PositionIndex(SelectedPositions):
    """What a layer's index computes of a batch's tokens. ``selection`` is set when the layer attends; later layers may
    attend to the same positions."""

    queries: torch.Tensor  # float32 [tokens, heads, size]
    keys: torch.Tensor  # [tokens, size]
    weights: torch.Tensor  # of the heads' scores, float32 [tokens, heads]
    scale: float  # factor of the products

    def select(self, spans: Iterable[Span], read_keys: Callable[[Span], torch.Tensor]) -> None:
        """Set the selection. ``read_keys`` returns a sequence's keys of the index up to the span's end, which are
        stored by now."""
        tokens, positions = list[torch.Tensor](), list[torch.Tensor]()
        for span in spans:
            num_whole = max(0, self.top_k - span.start)  # tokens that attend to all that they see
            if num_whole < span.count:
                offsets = torch.arange(span.offset + num_whole, span.offset + span.count, device=self.keys.device)
                tokens.append(offsets)
                positions += self._select_in(read_keys(span).float(), offsets, span.start + num_whole)
        self.selection = Selection(torch.cat(tokens), torch.cat(positions)) if tokens else None

    def _select_in(self, keys: torch.Tensor, tokens: torch.Tensor, start: int) -> Iterator[torch.Tensor]:
        """Yield the positions ``[tokens, top_k]`` that some consecutive tokens of one sequence attend to. ``start``:
        the first one's."""
        multiply = _multiplier(keys)
        most = max(1, _MOST_SCORES // (len(keys) * self.queries.shape[1]))
        numbers = torch.arange(len(keys), device=keys.device)
        for first in range(0, len(tokens), most):
            some = tokens[first : first + most]
            scores = self._score(multiply(self.queries[some]), self.weights[some])
            own = start + first + torch.arange(len(some), device=keys.device)
            is_chosen = choose_largest(scores.masked_fill_(numbers > own[:, None], -math.inf), self.top_k)
            yield is_chosen.nonzero()[:, 1].view(len(some), self.top_k)

    def _score(self, products: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the scores ``[tokens, positions]`` from products ``[tokens, heads, positions]``, which are changed."""
        terms = products.mul_(self.scale).relu_().mul_(weights.unsqueeze(-1))
        total = terms[:, 0].clone()
        for head in range(1, terms.shape[1]):
            total += terms[:, head]
        return total


def select_positions(
    index: SelectedPositions, forward_pass: ForwardPass, query: torch.Tensor, key: torch.Tensor, read: ReadLatents
) -> torch.Tensor:
    """Set the selection of a layer's own index, whose keys are written by now. Return the layer's queries as wide as
    its keys, with zeros where the index's key is."""
    width = query.shape[2]
    if width == key.shape[2]:
        return query
    assert isinstance(index, PositionIndex), "keys end with those of the layer's own index"
    index.select(forward_pass.spans, lambda span: read(span)[:, width : key.shape[2]])
    return torch.nn.functional.pad(query, (0, key.shape[2] - width))


def stored_latents(arena: KvArena, find_buffer: FindBuffer) -> ReadLatents:
    """Return a function that reads the rows in an arena's racks. ``find_buffer`` returns the layer's memory in one."""

    def read(span: Span) -> torch.Tensor:
        rack, place = arena.slot(span.sequence)
        return find_buffer(rack).region(place).keys[0, : span.start + span.count]

    return read


def _multiplier(keys: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the product of queries ``[tokens, heads, size]`` with these keys, both in float32: ``[tokens, heads,
    positions]``."""
    if NativeLinear.supports(keys.device, keys.dtype):
        return NativeLinear(keys, None)
    if keys.device.type != "cpu":  # we do not test the bits of other devices
        return lambda queries: torch.matmul(queries, keys.T)
    return lambda queries: _multiply_by_element(queries, keys)


def _multiply_by_element(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    total = queries.new_zeros(*queries.shape[:2], len(keys))
    for element in range(keys.shape[1]):
        total += queries[..., element, None] * keys[:, element]
    return total


def choose_largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return which ``count`` scores of each row are the largest, the first ones among equals: a mask. A score that is
    not a number counts as the largest."""
    scores = scores.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    least = scores.topk(count, dim=-1).values[:, -1:]
    is_larger, is_equal = scores > least, scores == least
    missing = count - is_larger.sum(-1, keepdim=True)
    return is_larger | (is_equal & (is_equal.cumsum(-1) <= missing))
