"""Suffix lookup: a sequence probably continues as its longest suffix did where it occurred before.

The lookup covers the sequence's own prompt and answer, and recent answers of the same tenant and adapter. It never
covers text of another tenant: how fast an answer arrives would otherwise reveal what others have asked.

Where one token differs from the text that was matched, as in an edit, the next three suffixes did not occur before. The
proposals then go on behind that token of the text, with strength 0.

Every index is a hash chain, as in deflate: a table from the hash of three tokens to their last position, and for every
position the previous one with the same hash; a match is then extended backwards. Measured on this machine, a position
takes 0.4 µs and at most 160 bytes, against 3.0 µs and 460 bytes and more in a suffix automaton, which also cannot
drop old text; a lookup takes 1 µs without a match and about 10 µs with one.

Prompts are indexed while the stages compute them, once for all sequences of a request. The index of a sequence then
covers its answer.

Work and memory are bounded. All sequences of a step share ``step_tokens`` that are indexed in it, so that a long prompt
that is found in a cache takes several steps. All indexes together hold at most ``max_tokens``; beyond that, the answers
of the tenants that were idle longest are dropped, and then nothing more is indexed. A restart of the broker only loses
the recent answers.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from swarm.broker.state.lifecycle import SequenceState

if TYPE_CHECKING:
    from collections.abc import Sequence as Tokens

    from swarm.broker.speculation.proposer import ProposerName
    from swarm.broker.state import Request, Sequence

MIN_MATCH: Final = 3  # tokens; shorter suffixes occur by chance
MAX_MATCH: Final = 32  # tokens; a longer match is not more certain
MAX_CANDIDATES: Final = 16  # earlier positions that a lookup compares in one index
MAX_STRENGTH: Final = 2 * MAX_MATCH.bit_length() - 1
_SEPARATOR: Final = -1  # between the answers of a tenant; no token
_FINISHED: Final = ("stop", "length")  # reasons of ends after which an answer is kept


@dataclass(frozen=True, slots=True)
class SuffixLimits:
    """Bounds of the proposer's memory and of its work in one call, in tokens."""

    max_tokens: int = 1 << 18  # of all indexes together
    max_tenant_tokens: int = 1 << 15  # of one tenant's recent answers
    step_tokens: int = 2048  # indexed in one step, for all its sequences
    least_tokens: int = 64  # that one lookup may index in any case: more than a step gives a sequence


class Match(NamedTuple):
    """An earlier occurrence of a suffix: its length, the position of its last token, and whether all occurrences that
    are about as long continue with the same token."""

    length: int
    position: int
    is_unanimous: bool


NO_MATCH: Final = Match(0, -1, True)


class ChainIndex:
    """Hash chains over a list of tokens, which may grow, from position ``first`` on."""

    def __init__(self, text: list[int], first: int = 0) -> None:
        self.text = text
        self._first = first
        self._heads: dict[int, int] = {}  # hash of MIN_MATCH tokens -> last position at which they end
        self._previous = array("i")  # from ``first`` on: the previous position with the same hash; -1 without one

    @property
    def num_indexed(self) -> int:
        return len(self._previous)

    @property
    def stop(self) -> int:
        """Position up to which the text is indexed."""
        return self._first + len(self._previous)

    def extend(self, stop: int) -> None:
        """Index the positions up to ``stop``."""
        tokens, heads, previous = self.text, self._heads, self._previous
        start = self.stop
        while start < min(MIN_MATCH - 1, stop):
            previous.append(-1)
            start += 1
        if start >= stop:
            return
        first, second = tokens[start - 2], tokens[start - 1]
        for position in range(start, stop):
            third = tokens[position]
            key = first << 42 ^ second << 21 ^ third
            previous.append(heads.get(key, -1))
            heads[key] = position
            first, second = second, third

    def find(self, tokens: Tokens[int], text: Tokens[int] | None = None) -> Match:
        """Return the longest suffix of ``tokens`` among the indexed positions, the most recent one of equal length.
        ``text``: one with the same tokens at these positions, by default the index's own."""
        end = len(tokens) - 1
        if end + 1 < MIN_MATCH:
            return NO_MATCH
        position = self._heads.get(tokens[end - 2] << 42 ^ tokens[end - 1] << 21 ^ tokens[end], -1)
        if position < 0:
            return NO_MATCH
        text, previous, first = self.text if text is None else text, self._previous, self._first
        length, best, continuations = 0, -1, []
        for _ in range(MAX_CANDIDATES):
            limit = min(MAX_MATCH, position + 1, end + 1)
            shared = 0
            while shared < limit and text[position - shared] == tokens[end - shared]:
                shared += 1
            if shared >= MIN_MATCH and position + 1 < len(text):
                continuations.append((shared, text[position + 1]))
                if shared > length:
                    length, best = shared, position
                    if shared == MAX_MATCH:
                        break
            position = previous[position - first]
            if position < 0:
                break
        if best < 0:
            return NO_MATCH
        following = text[best + 1]
        is_unanimous = all(token == following for shared, token in continuations if 2 * shared >= length)
        return Match(length, best, is_unanimous)


def _better(match: Match, earlier: Match, tokens: Tokens[int]) -> Match:
    """Return the longer of two matches in the same text, the first of equal length."""
    best, other = (earlier, match) if earlier.length > match.length else (match, earlier)
    if 2 * other.length < best.length or not other.length:
        return best
    agree = tokens[best.position + 1] == tokens[other.position + 1]
    return best._replace(is_unanimous=agree and best.is_unanimous and other.is_unanimous)


def continuation(tokens: list[int], position: int, most: int, period: int = 0) -> tuple[int, ...]:
    """Return at most ``most`` tokens that follow ``position``, up to a separator. With a ``period``, the text ends that
    many tokens behind the position, and is assumed to repeat."""
    following = tokens[position + 1 : position + 1 + most]
    if _SEPARATOR in following:
        del following[following.index(_SEPARATOR) :]
    elif period:
        while len(following) < most:
            following.append(following[-period])
    return tuple(following)


class _RecentAnswers:
    """Recent answers of a tenant, in two generations: when the newer one is full, the older one is dropped."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens // 2
        self.newer, self.older = ChainIndex([]), ChainIndex([])

    @property
    def num_tokens(self) -> int:
        return len(self.newer.text) + len(self.older.text)

    def add(self, answer: Tokens[int]) -> None:
        """Keep an answer, without its beginning if it is too long."""
        if len(self.newer.text) + len(answer) >= self._max_tokens:
            self.older, self.newer = self.newer, ChainIndex([])
        self.newer.text.extend(answer[-self._max_tokens + 1 :])
        self.newer.text.append(_SEPARATOR)

    def extend(self, most: int) -> int:
        """Index at most this many tokens; return how many were indexed."""
        left = most
        for index in (self.older, self.newer):
            stop = min(len(index.text), index.stop + left)
            left -= stop - index.stop
            index.extend(stop)
        return most - left


@dataclass(slots=True)
class _Prompt:
    """Index of a request's prompt."""

    chains: ChainIndex
    users: set[int] = field(default_factory=set)  # running sequences of the request


@dataclass(slots=True)
class _Running:
    """Indexes of a running sequence, its last match, and the strength of its last proposal."""

    sequence: Sequence
    prompt: _Prompt
    answer: ChainIndex = field(init=False)
    strength: int = 0
    matched: list[int] = field(default_factory=list)  # text of the last match
    shift: int = 0  # from a position of the sequence to the same one in that text

    def __post_init__(self) -> None:
        self.answer = ChainIndex(self.sequence.tokens, self.sequence.num_prompt)

    def is_aligned(self) -> bool:
        """Whether the newest tokens are those of the last match but for one."""
        tokens = self.sequence.tokens
        end = len(tokens) + self.shift
        if end < MIN_MATCH or end > len(self.matched):
            return False
        newest = zip(tokens[-MIN_MATCH:], self.matched[end - MIN_MATCH : end], strict=True)
        return sum(token != matched for token, matched in newest) <= 1


class SuffixProposer:
    """Proposes what followed the longest suffix that occurred before (see the module)."""

    name: ProposerName = "suffix"

    def __init__(self, limits: SuffixLimits | None = None) -> None:
        self._limits = limits or SuffixLimits()
        self._running: dict[int, _Running] = {}
        self._prompts: dict[Request, _Prompt] = {}
        self._left = self._limits.step_tokens  # tokens that may still be indexed in this step
        self._recent: OrderedDict[tuple[str, str], _RecentAnswers] = (
            OrderedDict()
        )  # by tenant and adapter, the one idle longest first
        self._num_indexed = 0  # positions in the indexes of running sequences
        self._num_recent = 0  # tokens of recent answers

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are kept or indexed."""
        return self._num_indexed + self._num_recent

    def begin_step(self, prefilling: Iterable[Sequence]) -> None:
        """Begin a step, and index the prompts of which it computes parts."""
        self._left = self._limits.step_tokens
        for sequence in prefilling:
            self._extend_prompt(self._get(sequence), 0)

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Return at most ``most`` tokens that followed the longest earlier occurrence of the sequence's suffix."""
        running = self._get(sequence)
        tokens = sequence.tokens
        if most <= 0 or not tokens:
            return ()
        self._extend_prompt(running, self._limits.least_tokens)
        self._extend_answer(running)
        best, text = running.answer.find(tokens), tokens
        if best.length < MAX_MATCH:
            best = _better(best, running.prompt.chains.find(tokens, tokens), tokens)
        period = len(tokens) - 1 - best.position
        recent = self._recent.get((sequence.request.tenant, sequence.adapter))
        if recent is not None and best.length < MAX_MATCH:
            self._left -= recent.extend(max(self._limits.least_tokens, self._left))
            for index in (recent.newer, recent.older):
                match = index.find(tokens)
                if match.length > best.length:
                    best, text, period = match, index.text, 0
        if not best.length:
            running.strength = 0
            return continuation(running.matched, len(tokens) - 1 + running.shift, most) if running.is_aligned() else ()
        running.matched, running.shift = text, best.position - len(tokens) + 1
        running.strength = 2 * best.length.bit_length() - (2 - best.is_unanimous)
        return continuation(text, best.position, most, period)

    def strength(self, sequence: int) -> int:
        """Return how certain the last proposal for a sequence is, from 0 to ``MAX_STRENGTH``: by the length of the
        match and the agreement of its continuations."""
        return self._running[sequence].strength

    def forget(self, sequence: int) -> None:
        """Drop the index of a sequence; keep its answer if it is complete."""
        running = self._running.pop(sequence, None)
        if running is None:
            return
        ended = running.sequence
        self._num_indexed -= running.answer.num_indexed
        running.prompt.users.discard(sequence)
        if not running.prompt.users:
            self._num_indexed -= running.prompt.chains.num_indexed
            del self._prompts[ended.request]
        if ended.state is SequenceState.ENDED and ended.reason in _FINISHED:
            self.remember(ended.request.tenant, ended.tokens[ended.num_prompt :], ended.adapter)

    def remember(self, tenant: str, answer: Tokens[int], adapter: str = "") -> None:
        """Keep an answer among the tenant's recent ones with this adapter."""
        if len(answer) <= MIN_MATCH:
            return
        recent = self._recent.pop((tenant, adapter), None) or _RecentAnswers(self._limits.max_tenant_tokens)
        self._num_recent -= recent.num_tokens
        recent.add(answer)
        self._num_recent += recent.num_tokens
        self._recent[tenant, adapter] = recent
        while self._recent and self.num_tokens > self._limits.max_tokens:
            self._drop_oldest()

    def _get(self, sequence: Sequence) -> _Running:
        running = self._running.get(sequence.id)
        if running is None:
            request = sequence.request
            prompt = self._prompts.get(request)
            if prompt is None:
                prompt = self._prompts[request] = _Prompt(ChainIndex(list(request.submit.prompt)))
            prompt.users.add(sequence.id)
            running = self._running[sequence.id] = _Running(sequence, prompt)
        return running

    def _extend_prompt(self, running: _Running, least: int) -> None:
        index = running.prompt.chains
        if index.stop < len(index.text):
            self._extend(index, len(index.text), least)

    def _extend_answer(self, running: _Running) -> None:
        index, stop = running.answer, len(running.sequence.tokens) - 1
        if index.stop > max(stop, running.sequence.num_prompt):  # a stop string has cut the answer
            self._num_indexed -= index.num_indexed
            index = running.answer = ChainIndex(running.sequence.tokens, running.sequence.num_prompt)
        self._extend(index, stop, self._limits.least_tokens)

    def _extend(self, index: ChainIndex, stop: int, least: int) -> None:
        """Index the next positions up to ``stop``, as far as work and memory are left."""
        most = min(stop - index.stop, max(least, self._left))
        while self._recent and self.num_tokens + most > self._limits.max_tokens:
            self._drop_oldest()
        most = min(most, self._limits.max_tokens - self.num_tokens)
        if most > 0:
            self._left -= most
            self._num_indexed += most
            index.extend(index.stop + most)

    def _drop_oldest(self) -> None:
        _, recent = self._recent.popitem(last=False)
        self._num_recent -= recent.num_tokens
