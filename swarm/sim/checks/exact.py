"""The exact expected result of one continuation: tokens, logprobs, the route of each token, the end, the vector, and
the log probabilities of the prompt."""

from __future__ import annotations

from collections import defaultdict

from swarm.client.events import Deliver
from swarm.testing import fake_prompt_logprobs, fake_vector
from swarm.wire.messages import Finished, Hop, Manifest, Submit, TokenLogprob

Draw = tuple[int, tuple[TokenLogprob, ...]]


class Expectation:
    """Expected result of one continuation, and what has been received so far."""

    def __init__(
        self, submit: Submit, index: int, draws: list[Draw], manifest: Manifest, stop_at: int | None = None
    ) -> None:
        self.submit = submit
        self.tokens = [token for token, _ in draws]
        self.stop_at = stop_at  # token index at which a stop string is found
        self.received: list[int] = []  # by its submitter
        self.end: str | None = None  # how it ended for its submitter
        self._logprobs = [logprobs for _, logprobs in draws]
        # routes of each token, for requests that ask for hops
        self._routes: defaultdict[int, list[tuple[Hop, ...]]] = defaultdict(list)
        params = submit.params
        self._vector: bytes | None = None
        self._prompt_logprobs: bytes | None = None
        if params.prompt_logprobs is not None and index == 0:
            values = fake_prompt_logprobs(submit.prompt, params, manifest.num_layers)
            self._prompt_logprobs = values or None
        if not params.max_answer:
            self._reason = "length"
        if params.vector is not None:
            self._reason = "stop"
            self._vector = fake_vector(submit.prompt, params, manifest.num_layers)
        if not draws:
            return
        last = self.tokens[-1]
        is_end = (last in manifest.eos_token_ids and not params.ignore_eos) or last in params.stop_token_ids
        self._reason = "stop" if is_end else "length"

    def add_route(self, index: int, hops: tuple[Hop, ...]) -> None:
        """Record the route by which a token reached the broker; several if lost tokens were computed again."""
        self._routes[index].append(hops)

    def delivery_error(self, delivery: Deliver) -> str:
        """Return the error in a delivery to a client; empty: none."""
        start, stop = delivery.start, delivery.start + len(delivery.ids)
        if list(delivery.ids) != self.tokens[start:stop]:
            return f"{delivery.ids} is not {self.tokens[start:stop]}"
        logprobs = tuple(self._logprobs[start:stop]) if self.submit.params.logprobs is not None else ()
        if delivery.logprobs != logprobs:
            return f"the logprobs of {start} to {stop} are {delivery.logprobs}, not {logprobs}"
        if len(delivery.hops) != (stop - start if self.submit.hops else 0):
            return f"{len(delivery.hops)} routes came with {stop - start} tokens"
        for index, hops in enumerate(delivery.hops, start):
            if hops not in self._routes[index]:
                return f"token {index} is reported to have come by {hops}, but came by {self._routes[index]}"
        return ""

    def end_error(self, finished: Finished) -> str:
        """Return the error in a successful end: it must be the natural one, or that of the stop string. Empty: none."""
        allowed = [(len(self.tokens), self._reason)]
        if self.stop_at is not None:
            allowed.append((self.stop_at, "stop"))
        if (finished.num_tokens, finished.reason) not in allowed:
            return f"ended with {finished.num_tokens} tokens by {finished.reason}, allowed is {allowed}"
        if finished.num_prompt != len(self.submit.prompt):
            return f"its prompt has {len(self.submit.prompt)} tokens, not {finished.num_prompt}"
        if finished.vector != self._vector:
            return f"its vector is {finished.vector!r}, not {self._vector!r}"
        if finished.prompt_logprobs != self._prompt_logprobs:
            return f"its prompt_logprobs are {finished.prompt_logprobs!r}, not {self._prompt_logprobs!r}"
        return ""
