"""The run to be measured: plain values, which are sent to the client processes as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from swarm.bench.lengths import Lengths
from swarm.errors import InvalidRequest

Api = Literal["chat", "completions"]


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """The server, and how requests are sent to it."""

    url: str  # base URL, to which ``/models`` is appended
    model: str
    api: Api = "chat"
    stream: bool = True
    key_env: str | None = None  # variable that holds the API key; the key itself is never written anywhere
    extra: dict[str, object] = field(default_factory=dict)  # further fields of each request's body
    timeout_s: float = 120.0
    max_retries: int = 3
    asks_usage: bool = True  # streams ask for a usage chunk


@dataclass(frozen=True, slots=True)
class RequestShape:
    """Lengths and contents of requests."""

    prompt: Lengths
    output: Lengths
    seed: int = 0
    shared_prefix: int = 0  # tokens of a common beginning, in addition to the prompt's own length
    num_prefixes: int = 1  # number of different common beginnings
    token_ids: tuple[int, int] | None = None  # prompts are ids from this range instead of words


@dataclass(frozen=True, slots=True)
class Scale:
    """Relation between words and a server's tokens."""

    base: float  # tokens of the template around the words
    per_word: float
    description: str  # how it was determined, for reports

    def words(self, num_tokens: int) -> int:
        """Return the number of words closest to this number of tokens, at least one."""
        return max(1, round((num_tokens - self.base) / self.per_word))

    def further_words(self, num_tokens: int) -> int:
        """Return the same for words after others, without the template's tokens."""
        return max(1, round(num_tokens / self.per_word))


ASSUMED = Scale(0.0, 1.3, "assumed: 1.3 tokens a word; the server does not report prompt lengths")
EXACT = Scale(0.0, 1.0, "exact: prompts are token ids")


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One load, held for a duration or for a number of requests, after a warm-up."""

    concurrency: int | None = None  # closed loop: requests in flight at any time
    rate: float | None = None  # open loop: requests per second, independent of the answers
    duration_s: float | None = None
    count: int | None = None  # number of requests
    warmup_s: float = 0.0  # warm-up with the same load
    warmup_count: int | None = None  # or warm-up with this number of requests; None: as many as will be in flight
    max_in_flight: int = 4096  # bound of an open loop


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """Latency limits of a good request, in seconds."""

    ttft: float | None = None  # time to first token
    tpot: float | None = None  # mean time per further token
    e2e: float | None = None  # time to the end

    def __bool__(self) -> bool:
        return any(value is not None for value in (self.ttft, self.tpot, self.e2e))

    def __str__(self) -> str:
        parts = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}
        return ", ".join(f"{name} ≤ {value * 1000:g} ms" for name, value in parts.items() if value is not None)


def base_url(url: str) -> str:
    """Complete a server's URL: ``http://host:8000`` gets ``/v1``; another path stays, without an endpoint's name."""
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


def parse_limits(text: str) -> LatencyLimits:
    """Parse ``ttft=500ms,tpot=50ms,e2e=10s``. Raises InvalidRequest."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in ("ttft", "tpot", "e2e") or name in limits:
            raise InvalidRequest(
                f"--goodput: {part.strip()!r} is no limit: ttft=…, tpot=…, e2e=…, each once, by commas"
            )
        limits[name] = parse_seconds(value, f"--goodput {name}")
    return LatencyLimits(**limits)


def parse_seconds(text: str, what: str) -> float:
    """Parse a time: ``250ms``, ``1.5s``, ``2m``, or seconds without a unit. Raises InvalidRequest."""
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
    """Parse ``key=json`` pairs, which are added to each request's body. Raises InvalidRequest."""
    extras: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise InvalidRequest(f"--extra {text!r}: give a field and its JSON value, such as ignore_eos=true")
        if name in ("stream", "model", "messages", "prompt"):
            raise InvalidRequest(f"--extra {name}: it has its own option, or is set by this tool")
        try:
            extras[name] = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"--extra {name}: {value!r} is not JSON ({error}); texts need quotes") from None
    return extras
