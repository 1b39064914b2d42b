"""The states that an undisturbed computation gives: what keys and values must be at each position of each layer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from swarm.params import SamplingParams
from swarm.testing import fake_layer, fake_salt
from swarm.testing_images import NO_SIGHT, fake_sight, see

MAX_CHAINS = 256  # sequences whose states are kept


class _Chain:
    """States of one history, layer by layer, as far as they were needed. ``params``: the adapter's key, and images."""

    def __init__(self, num_layers: int, params: SamplingParams) -> None:
        self.adapter, self.images = params.adapter, params.images
        self.tokens: list[int] = []
        self.states: list[list[int]] = [[] for _ in range(num_layers)]

    def cut(self, position: int) -> None:
        del self.tokens[position:]
        for states in self.states:
            del states[position:]

    def extend(self, tokens: Sequence[int]) -> None:
        salt = fake_salt(self.adapter)
        for position, token in enumerate(tokens, len(self.tokens)):
            hidden, sight = token + 1, fake_sight(self.images, position) if self.images else NO_SIGHT
            for layer, states in enumerate(self.states):
                hidden = see(layer, hidden, sight) if sight is not NO_SIGHT else hidden
                state, hidden = fake_layer(layer + salt, states[-1] if states else 0, hidden)
                states.append(state)
        self.tokens += tokens


class ExpectedStates:
    """States by sequence number. If the number stands for another history, they are computed again."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._chains: OrderedDict[int, _Chain] = OrderedDict()

    def of(self, sequence: int, tokens: Sequence[int], params: SamplingParams) -> list[list[int]]:
        """Return the states of these tokens with a request's adapter and images, by layer; there may be more of them
        behind."""
        chain = self._chains.pop(sequence, None)
        if chain is None or (chain.adapter, chain.images) != (params.adapter, params.images):
            chain = _Chain(self._num_layers, params)
        self._chains[sequence] = chain
        if len(self._chains) > MAX_CHAINS:
            self._chains.popitem(last=False)
        common = min(len(chain.tokens), len(tokens))
        if chain.tokens[:common] != list(tokens[:common]):
            common = next(i for i in range(common) if chain.tokens[i] != tokens[i])
            chain.cut(common)
        chain.extend(tokens[common:])
        return chain.states
