"""Texts of requests. Pure, seeded: a request's number determines its text and lengths, whichever process sends it.

A prompt is words from a pool that is shuffled once. Its first words are drawn for it alone, so no two prompts share a
beginning by accident, and a prefix cache helps only where a shared prefix was configured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from swarm.bench.plan import RequestShape, Scale

POOL_SIZE = 8192  # words in the pool
OWN_WORDS = 4  # first words drawn for each prompt alone: 256 ** 4 beginnings
_TEXT = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other time new some could these two may first then do any like my now over such our man "
    "me even most made after also did many off before must well back through years where much your way down should "
    "because long each just state people those too how little good world make very year still see own work men day "
    "get here between both life being under three never know same last another while us might great old since against "
    "go came right used take states himself few house use during without again place around however home small found "
    "thought went say part once high upon school every far light hand side head set night water end room city left "
    "public given order young white next face river stone bread music green paper winter garden letter window morning "
    "summer father mother story ground music voice market number table silver bridge horse field tree road door ship"
)
WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request: its text and its lengths."""

    index: int
    prompt: str | list[int]
    prompt_tokens: int  # expected, as far as the scale is right
    output_tokens: int


@dataclass(slots=True)
class PromptSource:
    """Generator of the requests of a run, by their numbers."""

    shape: RequestShape
    scale: Scale
    _pool: list[str] = field(default_factory=list)
    _prefixes: dict[int, str | list[int]] = field(default_factory=dict)

    def make_request(self, index: int) -> BenchRequest:
        chance = Random(f"{self.shape.seed}:{index}")
        own, output = self.shape.prompt.draw(chance), self.shape.output.draw(chance)
        tokens = own + self.shape.shared_prefix
        if self.shape.token_ids is not None:
            ids = self._ids(chance, own)
            return BenchRequest(index, [*self._prefix_ids(chance), *ids], tokens, output)
        prefix = self._prefix_text(chance)
        if prefix:
            return BenchRequest(index, f"{prefix} {self._text(chance, self.scale.further_words(own))}", tokens, output)
        return BenchRequest(index, self._text(chance, self.scale.words(own)), tokens, output)

    def words(self, count: int, name: str) -> str:
        """Return this number of words, the same for the same name."""
        return self._text(Random(f"{self.shape.seed}:{name}"), count)

    def _text(self, chance: Random, count: int) -> str:
        """Draw the first words, and take the rest from the pool, which makes long prompts cheap."""
        if not self._pool:
            self._pool = Random(f"{self.shape.seed}:pool").choices(WORDS, k=POOL_SIZE)
        begin = chance.choices(WORDS, k=min(OWN_WORDS, count))
        rest, at = count - len(begin), chance.randrange(POOL_SIZE)
        while rest > 0:
            piece = self._pool[at : at + rest]
            begin += piece
            rest, at = rest - len(piece), 0
        return " ".join(begin)

    def _ids(self, chance: Random, count: int) -> list[int]:
        low, high = self.shape.token_ids or (0, 0)
        return chance.choices(range(low, high + 1), k=count)

    def _group(self, chance: Random) -> int:
        return chance.randrange(self.shape.num_prefixes)

    def _prefix_text(self, chance: Random) -> str:
        if not self.shape.shared_prefix:
            return ""
        group = self._group(chance)
        if group not in self._prefixes:
            own = Random(f"{self.shape.seed}:prefix:{group}")
            self._prefixes[group] = self._text(own, self.scale.words(self.shape.shared_prefix))
        return str(self._prefixes[group])

    def _prefix_ids(self, chance: Random) -> list[int]:
        if not self.shape.shared_prefix:
            return []
        own = Random(f"{self.shape.seed}:prefix:{self._group(chance)}")
        return self._ids(own, self.shape.shared_prefix)
