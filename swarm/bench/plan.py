"""What is to be run: plain values, which travel to the client processes as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from swarm.bench.lengths import Lengths
from swarm.errors import InvalidRequest

Api = Literal["chat", "completions"]


@dataclass(frozen=True, slots=True)
class Target:
    """Who is asked, and how. ``url`` ends in what ``/models`` is put behind; ``key_env`` names the variable that holds
    the key, which itself is never written anywhere. ``asks_usage``: whether streams are asked for a usage chunk."""

    url: str
    model: str
    api: Api = "chat"
    stream: bool = True
    key_env: str | None = None
    extra: dict[str, object] = field(default_factory=dict)
    timeout_s: float = 120.0
    max_retries: int = 3
    asks_usage: bool = True


@dataclass(frozen=True, slots=True)
class Shape:
    """What requests look like. ``shared_prefix``: tokens that each prompt begins with, beside its own length, one of
    ``num_prefixes`` texts. ``token_ids``: prompts are ids from this range instead of words."""

    prompt: Lengths
    output: Lengths
    seed: int = 0
    shared_prefix: int = 0
    num_prefixes: int = 1
    token_ids: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """How many tokens a server makes of our words: ``base`` for the template around them, ``per_word`` for each."""

    base: float
    per_word: float
    how: str

    def words(self, num_tokens: int) -> int:
        """Count the words that come nearest to so many tokens: one at least."""
        return max(1, round((num_tokens - self.base) / self.per_word))

    def further_words(self, num_tokens: int) -> int:
        """The same for words beside others: the template is paid for already."""
        return max(1, round(num_tokens / self.per_word))


ASSUMED = Scale(0.0, 1.3, "assumed: 1.3 tokens a word; the server does not say how long prompts are")
EXACT = Scale(0.0, 1.0, "exact: prompts are token ids")


@dataclass(frozen=True, slots=True)
class Point:
    """One load: ``concurrency`` requests at any time (closed loop), or ``rate`` a second whatever becomes of them (open
    loop); for ``duration_s`` or ``count`` requests, after ``warmup_s`` of the same load, or ``warmup_count``
    requests (None: as many as will be in flight)."""

    concurrency: int | None = None
    rate: float | None = None
    duration_s: float | None = None
    count: int | None = None
    warmup_s: float = 0.0
    warmup_count: int | None = None
    max_in_flight: int = 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must keep to count as good, in seconds: first token, each further one on average, the whole."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __bool__(self) -> bool:
        return any(value is not None for value in (self.ttft, self.tpot, self.e2e))

    def __str__(self) -> str:
        parts = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}
        return ", ".join(f"{name} ≤ {value * 1000:g} ms" for name, value in parts.items() if value is not None)


def base_url(url: str) -> str:
    """Complete a server's URL: ``http://host:8000`` gets ``/v1``; a path that is there stays, but for an endpoint's."""
    try:
        parts = urlsplit(url)
        is_fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_fine = False
    if not is_fine or parts.query or parts.fragment:
        raise InvalidRequest(f"{url!r} is not a server's URL: something like http://127.0.0.1:8000 or https://host/v1")
    if parts.username is not None or parts.password is not None:
        raise InvalidRequest("a URL with a password in it would be written into reports: use --api-key-env")
    path = parts.path.rstrip("/")
    for ending in ("/chat/completions", "/completions", "/models"):
        path = path.removesuffix(ending)
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def parse_limits(text: str) -> Limits:
    """Read ``ttft=500ms,tpot=50ms,e2e=10s``. Raises InvalidRequest for anything else."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in ("ttft", "tpot", "e2e") or name in found:
            raise InvalidRequest(
                f"--goodput: {part.strip()!r} is no limit: ttft=…, tpot=…, e2e=…, each once, by commas"
            )
        found[name] = parse_seconds(value, f"--goodput {name}")
    return Limits(**found)


def parse_seconds(text: str, what: str) -> float:
    """Read a time: ``250ms``, ``1.5s``, ``2m``, or seconds without a unit."""
    for unit, factor in (("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0), ("", 1.0)):
        if text.endswith(unit):
            try:
                seconds = float(text[: len(text) - len(unit)]) * factor
            except ValueError:
                break
            if 0 < seconds <= 30 * 86400:
                return seconds
            break
    raise InvalidRequest(f"{what}: {text!r} is not a time: 250ms, 1.5s, 2m")


def parse_extras(texts: list[str]) -> dict[str, object]:
    """Read ``key=json`` pairs that go into each body as they are. Raises InvalidRequest for what is none."""
    found: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise InvalidRequest(f"--extra {text!r}: give a field and its JSON value, such as ignore_eos=true")
        if name in ("stream", "model", "messages", "prompt"):
            raise InvalidRequest(f"--extra {name}: has an option of its own, or is made by this tool")
        try:
            found[name] = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"--extra {name}: {value!r} is not JSON ({error}); texts need quotes") from None
    return found
