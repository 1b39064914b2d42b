"""Proposed tokens in attention: what they store must not reach the rows before them.

A masked key has the weight 0, but 0 times a value that is not finite is not 0. Certain tokens store finite values, or
their sequence ends. A guess may be a text for which the model computes nothing finite. If so, zeros are stored in
place of its values, and the results of the guess itself and of those behind it are made not finite: if the guess is
accepted, its sequence fails as without proposals. Our own kernel does the same (``attention.h``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from swarm.stage.attention.grid import Span


@dataclass(frozen=True, slots=True)
class Guesses:
    """The tokens of a batch that are proposals. ``first``: of each token's row, the first one; its own offset for a
    certain token."""

    are_guessed: torch.Tensor  # bool, by token
    first: torch.Tensor  # offset in the batch, by token

    def clean(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens' values ``[tokens, heads, size]`` with zeros in place of what guesses must not store, and
        which tokens' results are not finite because of it. ``value`` may have more rows, of no token."""
        value = value[: len(self.are_guessed)]
        is_bad = ~torch.isfinite(value).flatten(1).all(1) & self.are_guessed
        num_bad = torch.cumsum(is_bad, 0)
        num_before = num_bad - is_bad.long()
        spoiled = self.are_guessed & (num_bad > num_before[self.first])
        return value.masked_fill(is_bad[:, None, None], 0.0), spoiled


def clean_guesses(
    guesses: Guesses | None, key: torch.Tensor, value: torch.Tensor, *, is_latent: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return keys and values as they may be stored, and which tokens' results are not finite. ``is_latent``: values are
    the first numbers of the keys."""
    if guesses is None:
        return key, value, None
    if is_latent:
        key, spoiled = guesses.clean(key)
    else:
        value, spoiled = guesses.clean(value)
    return key, value, spoiled


def spoil(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Make the results of these tokens not finite."""
    output[: len(tokens)].masked_fill_(tokens[:, None, None], math.nan)
    return output


def mark_guesses(spans: Sequence[Span], device: torch.device) -> Guesses | None:
    """Return which tokens of a batch are proposals; None without any."""
    if not any(span.num_proposed for span in spans):
        return None
    num_tokens = sum(span.count for span in spans)
    are_guessed, first = torch.zeros(num_tokens, dtype=torch.bool), torch.arange(num_tokens)
    for span in spans:
        stop = span.offset + span.count
        are_guessed[stop - span.num_proposed : stop] = True
        first[stop - span.num_proposed : stop] = stop - span.num_proposed
    return Guesses(are_guessed.to(device), first.to(device))
