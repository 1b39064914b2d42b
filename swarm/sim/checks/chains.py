"""The states that an undisturbed computation gives: what keys and values must be at each position of each layer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from swarm.testing import fake_layer

MAX_CHAINS = 256  # sequences whose states are kept


class _Chain:
    """States of one history, layer by layer, as far as they were needed."""

    def __init__(self, num_layers: int) -> None:
        self.tokens: list[int] = []
        self.states: list[list[int]] = [[] for _ in range(num_layers)]

    def cut(self, position: int) -> None:
        del self.tokens[position:]
        for states in self.states:
            del states[position:]

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            hidden = token + 1
            for layer, states in enumerate(self.states):
                state, hidden = fake_layer(layer, states[-1] if states else 0, hidden)
                states.append(state)
        self.tokens += tokens


class ExpectedStates:
    """States by sequence number. If the number stands for another history, they are computed again."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._chains: OrderedDict[int, _Chain] = OrderedDict()

    def of(self, sequence: int, tokens: Sequence[int]) -> list[list[int]]:
        """Return the states of these tokens, by layer; there may be more of them behind."""
        chain = self._chains.pop(sequence, None) or _Chain(self._num_layers)
        self._chains[sequence] = chain
        if len(self._chains) > MAX_CHAINS:
            self._chains.popitem(last=False)
        common = min(len(chain.tokens), len(tokens))
        if chain.tokens[:common] != list(tokens[:common]):
            common = next(i for i in range(common) if chain.tokens[i] != tokens[i])
            chain.cut(common)
        chain.extend(tokens[common:])
        return chain.states
