"""The draft model's process: it proposes the tokens of an undisturbed run, or lies about tokens and lengths.

It keeps the tokens that the broker has sent, as ``swarm.draft`` does, and reports a violation if they are not those of
the broker's sequence. It answers late, not at all, or twice; it loses sequences, and dies.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec

from swarm.broker.draft_process import ANSWER_TIMEOUT_S
from swarm.broker.events import DraftGone, DraftMessageReceived
from swarm.sim.actors.environment import Environment
from swarm.sim.actors.guesses import BEYOND, FOREIGN
from swarm.sim.checks.audit import Violation
from swarm.sim.schedules.schedule import DraftBehaviour
from swarm.testing import fake_continuation
from swarm.wire.draft_messages import (
    AskedSequence,
    AskProposals,
    CaughtUp,
    DraftedTokens,
    DraftLoaded,
    DraftMessage,
    DraftOpening,
    Dropped,
    Proposals,
)
from swarm.wire.messages import MAX_PROPOSED

LOAD_S = (0.01, 0.5)
ANSWER_S = (0.0001, 0.003)
LATE_S = (0.02, 1.5)  # the broker's sequences wait for half a second at most
CATCH_UP_S = (0.001, 0.1)


class SimDraft:
    """Process of one broker process, over all its starts. ``feed``: called with its events, as long as that broker
    process lives."""

    def __init__(self, cluster: Environment, feed: Callable[[DraftMessageReceived | DraftGone], None]) -> None:
        self._cluster, self._world, self._feed = cluster, cluster.world, feed
        self._random: Random = cluster.world.draft_random
        self._life = 0  # number of the start
        self._is_loaded = False
        self._openings: dict[int, DraftOpening] = {}
        self._tokens: dict[int, list[int]] = {}
        self._answers: dict[int, list[int]] = {}  # tokens of undisturbed runs
        self._start_later()

    def _start_later(self) -> None:
        self._openings.clear()
        self._tokens.clear()
        self._answers.clear()
        manifest = self._cluster.manifest
        loaded = DraftLoaded("draft", manifest.vocab_size, manifest.context, (), 1, 0.1)
        self._life += 1

        def load() -> None:
            self._is_loaded = True
            self._feed(DraftMessageReceived(loaded))

        self._call_later(LOAD_S, load)

    def ask(self, ask: AskProposals) -> None:
        """Handle a request of the broker, which is lost on a dead process."""
        if not self._is_loaded:
            return
        behaviour: DraftBehaviour = self._random.choice(self._draft_behaviours())
        self._cluster.fault_counts[f"draft {behaviour}"] += 1
        if behaviour == "dies":
            self._die()
            return
        for ended in ask.forget:
            self._release(ended)
        lost = [entry.sequence for entry in ask.sequences if not self._update(entry)]
        held = [entry for entry in ask.sequences if entry.sequence in self._tokens]
        if behaviour == "silent":
            self._call_later((ANSWER_TIMEOUT_S, ANSWER_TIMEOUT_S), self._die)
            return
        drafted = tuple(self._propose(entry, behaviour) for entry in held)
        answer = Proposals(ask.number, drafted, lost=tuple(lost), passes=1, seconds=0.001)
        match behaviour:
            case "late":
                self._send_later(LATE_S, answer)
                return
            case "twice":
                self._send_later(ANSWER_S, answer)
            case "other_number":
                self._send_later((0.0, 0.0), msgspec.structs.replace(answer, number=ask.number + 1))
            case "behind" if held:
                answer = self._fall_behind(answer, held)
            case "drops" if held:
                dropped = self._random.choice(held).sequence
                self._release(dropped)
                answer = msgspec.structs.replace(answer, dropped=(dropped, dropped, 1 << 30), refused=(1 << 30,))
            case "loses" if held:
                for entry in held:
                    self._release(entry.sequence)
                answer = msgspec.structs.replace(answer, lost=tuple(entry.sequence for entry in ask.sequences))
            case _:
                pass
        self._send_later(ANSWER_S, answer)

    def _draft_behaviours(self) -> tuple[DraftBehaviour, ...]:
        assert self._cluster.speculation is not None  # otherwise there is no draft process
        return self._cluster.speculation.drafts

    def _update(self, entry: AskedSequence) -> bool:
        """Add a sequence's new tokens; return False if earlier ones are missing."""
        if entry.opening is not None:
            if entry.start:
                raise Violation(f"I17: sequence {entry.sequence} is opened in the draft model at {entry.start}")
            self._release(entry.sequence)
            self._openings[entry.sequence], self._tokens[entry.sequence] = entry.opening, []
        tokens = self._tokens.get(entry.sequence)
        if tokens is None:
            return False
        if entry.start > len(tokens):
            raise Violation(f"I17: the draft model lacks tokens of sequence {entry.sequence} before {entry.start}")
        tokens[entry.start :] = entry.tokens
        sequence = self._cluster.broker.core.state.sequences.get(entry.sequence)
        if sequence is not None and tokens != sequence.tokens:
            raise Violation(f"I17: the draft model has other tokens of sequence {entry.sequence} than the broker")
        return True

    def _propose(self, entry: AskedSequence, behaviour: DraftBehaviour) -> DraftedTokens:
        tokens, vocab_size = self._tokens[entry.sequence], self._cluster.manifest.vocab_size
        start = len(tokens)
        num_generated = start - self._openings[entry.sequence].num_prompt
        proposed = self._answer(entry.sequence)[num_generated : num_generated + entry.most]
        most = 1 << 20 if behaviour == "other_lengths" else len(proposed)
        match behaviour:
            case "wrong":
                proposed = [(token + 1) % vocab_size for token in proposed]
            case "partly":
                place = self._random.randrange(len(proposed) + 1)
                proposed[place:] = [(token + 1) % vocab_size for token in proposed[place:]]
            case "foreign":
                proposed.insert(self._random.randrange(len(proposed) + 1), vocab_size + self._random.choice(FOREIGN))
            case "other_lengths":
                proposed += [self._random.randrange(vocab_size) for _ in range(MAX_PROPOSED - len(proposed))]
            case "other_place":
                start = max(0, start + self._random.choice((-1, 1, MAX_PROPOSED)))
            case _:
                pass
        proposed = proposed[: min(most, MAX_PROPOSED)]
        num_logprobs = len(proposed) - (behaviour == "other_logprobs")
        return DraftedTokens(entry.sequence, start, tuple(proposed), (-0.01,) * max(0, num_logprobs))

    def _answer(self, sequence: int) -> list[int]:
        """Return the tokens of an undisturbed run, also beyond its end."""
        if sequence not in self._answers:
            opening = self._openings[sequence]
            params = msgspec.structs.replace(
                opening.params,
                max_tokens=opening.limit - opening.num_prompt + BEYOND,
                ignore_eos=True,
                stop_token_ids=(),
            )
            prompt = self._tokens[sequence][: opening.num_prompt]
            self._answers[sequence] = fake_continuation(prompt, params, opening.seed, self._cluster.manifest)
        return self._answers[sequence]

    def _fall_behind(self, answer: Proposals, held: list[AskedSequence]) -> Proposals:
        """Let a sequence catch up, or be dropped before it has."""
        behind = self._random.choice(held).sequence

        def caught_up() -> None:
            if behind not in self._tokens:
                return
            if self._random.random() < 0.5:
                self._feed(DraftMessageReceived(CaughtUp(behind)))
            else:
                self._release(behind)
                self._feed(DraftMessageReceived(Dropped(behind)))

        self._call_later(CATCH_UP_S, caught_up)
        return msgspec.structs.replace(
            answer, behind=(behind,), drafted=tuple(d for d in answer.drafted if d.sequence != behind)
        )

    def _die(self) -> None:
        self._is_loaded = False
        self._world.schedule(0.0, lambda: self._feed(DraftGone("exit code -9", is_final=False)))
        self._start_later()

    def _release(self, sequence: int) -> None:
        self._openings.pop(sequence, None)
        self._tokens.pop(sequence, None)
        self._answers.pop(sequence, None)

    def _send_later(self, delay_s: tuple[float, float], message: DraftMessage) -> None:
        self._call_later(delay_s, lambda: self._feed(DraftMessageReceived(message)))

    def _call_later(self, delay_s: tuple[float, float], call: Callable[[], None]) -> None:
        """Call later, if the process lives then."""
        life = self._life
        self._world.schedule(self._random.uniform(*delay_s), lambda: call() if life == self._life else None)
