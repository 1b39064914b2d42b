"""What one continuation must give, to the last digit: tokens, logprobs, the way of each token, the end."""

from __future__ import annotations

from collections import defaultdict

from swarm.client.events import Deliver
from swarm.wire.messages import Finished, Hop, Manifest, Submit, TokenLogprob

Draw = tuple[int, tuple[TokenLogprob, ...]]


class Expectation:
    """Beside what has come of it so far. ``received``: by its submitter; ``end``: how it ended there; ``stop_at``: at
    which token a stop string is found."""

    def __init__(self, submit: Submit, draws: list[Draw], manifest: Manifest, stop_at: int | None = None) -> None:
        self.submit = submit
        self.tokens = [token for token, _ in draws]
        self.stop_at = stop_at
        self.received: list[int] = []
        self.end: str | None = None
        self._logprobs = [logprobs for _, logprobs in draws]
        self._ways: defaultdict[int, list[tuple[Hop, ...]]] = defaultdict(list)  # of those who want to know
        params, last = submit.params, self.tokens[-1]
        is_end = (last in manifest.eos_token_ids and not params.ignore_eos) or last in params.stop_token_ids
        self._reason = "stop" if is_end else "length"

    def drawn(self, index: int, hops: tuple[Hop, ...]) -> None:
        """A token came to the broker by this way. More than once, if what was lost was computed again."""
        self._ways[index].append(hops)

    def astray(self, told: Deliver) -> str:
        """Say what is wrong with what a client was told; empty if nothing is."""
        start, stop = told.start, told.start + len(told.ids)
        if list(told.ids) != self.tokens[start:stop]:
            return f"{told.ids} is not {self.tokens[start:stop]}"
        logprobs = tuple(self._logprobs[start:stop]) if self.submit.params.logprobs is not None else ()
        if told.logprobs != logprobs:
            return f"the logprobs of {start} to {stop} are {told.logprobs}, not {logprobs}"
        if len(told.hops) != (stop - start if self.submit.hops else 0):
            return f"{len(told.hops)} ways came with {stop - start} tokens"
        for index, hops in enumerate(told.hops, start):
            if hops not in self._ways[index]:
                return f"token {index} is said to have come by {hops}, and came by {self._ways[index]}"
        return ""

    def wrong_end(self, finished: Finished) -> str:
        """Say what is wrong with a good end: it must be the natural one, or that of the stop string."""
        allowed = [(len(self.tokens), self._reason)]
        if self.stop_at is not None:
            allowed.append((self.stop_at, "stop"))
        if (finished.num_tokens, finished.reason) not in allowed:
            return f"ended with {finished.num_tokens} tokens by {finished.reason}, allowed is {allowed}"
        if finished.num_prompt != len(self.submit.prompt):
            return f"its prompt has {len(self.submit.prompt)} tokens, not {finished.num_prompt}"
        return ""
