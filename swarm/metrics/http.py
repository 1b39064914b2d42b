"""Metrics of a gateway: requests, tokens, and the waiting times of clients.

Counting runs on the gateway's event loop: plain arithmetic without locks, 0.4 µs per token. Metrics are built when they
are collected.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator

import psutil
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from swarm.clock import Clock, SystemClock
from swarm.metrics.collectors import build_histogram
from swarm.series import LONG_S, SHORT_S, Histogram

MAX_NAMES = 32  # of APIs, and of models; later ones are counted as "other"
OTHER = "other"
CONNECTION = "connection"  # takes the place of an API: a connection without a valid request
TOKENS = ("prompt", "cached", "answer")


class RequestTimer:
    """Timer of one request: the arrival of its tokens, and its end."""

    __slots__ = ("_api", "_began", "_gaps", "_last", "_model", "_now", "_numbers", "_over")

    def __init__(self, numbers: HttpMetrics, api: str, model: str) -> None:
        self._numbers = numbers
        self._api = api
        self._model = model
        self._now = numbers.clock.now
        self._gaps = numbers.inter_token_times[api]
        self._began = self._now()
        self._last: float | None = None
        self._over = False

    def on_first_token(self) -> None:
        """Record the first token. Further calls have no effect."""
        if self._last is None:
            self._last = self._now()
            self._numbers.first_token_times[self._api].add(self._last - self._began)

    def on_tokens(self, count: int = 1) -> None:
        """Record one or several further tokens. Those that come together share the time since the one before; the
        first call may be the first token."""
        if self._last is None:
            self.on_first_token()
            self._gaps.add(0.0, count - 1)
        else:
            now = self._now()
            self._gaps.add((now - self._last) / count, count)
            self._last = now

    def mark_refused(self) -> None:
        """Remove a request that will not be answered; it is counted as refused instead."""
        if not self._over:
            self._over = True
            self._numbers.open_requests[self._api] -= 1

    def finish(self, outcome: str, prompt: int = 0, cached: int = 0, answer: int = 0) -> None:
        """Record the end of the request and its numbers of tokens. ``outcome``: one of few names.

        Only the first call counts, so that a ``finally`` may call it, too.
        """
        if self._over:
            return
        self._over = True
        numbers, name = self._numbers, (self._api, self._model)
        numbers.open_requests[self._api] -= 1
        numbers.ended_counts[(*name, outcome)] += 1
        numbers.request_times[self._api].add(self._now() - self._began)
        for kind, count in zip(TOKENS, (prompt, cached, answer), strict=True):
            numbers.token_counts[(*name, kind)] += count


class HttpMetrics(Collector):
    """Counters of a gateway. ``registry`` holds them and the figures of the gateway's process, nothing else."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.open_requests: Counter[str] = Counter()
        self.ended_counts: Counter[tuple[str, str, str]] = Counter()
        self.token_counts: Counter[tuple[str, str, str]] = Counter()
        self.refused_counts: Counter[tuple[str, str]] = Counter()  # refused requests, by API and status
        self.upstream_counts: Counter[tuple[str, str]] = Counter()  # by server and outcome
        self.first_token_times: dict[str, Histogram] = {}
        self.inter_token_times: dict[str, Histogram] = {}
        self.request_times: dict[str, Histogram] = {}  # seconds from arrival to end, by API
        self._models: set[str] = set()
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.registry.register(GatewayProcess())

    def start_request(self, api: str, model: str) -> RequestTimer:
        """Start the timer of a request that will be answered.

        ``api``: "chat", "completions" and so on. ``model``: the name of a served model, never a client's arbitrary
        text.
        """
        api = self._api(api)
        self.open_requests[api] += 1
        return RequestTimer(self, api, self._model(model))

    def count_refused(self, api: str, status: int) -> None:
        """Count a request that was answered with an error before anything ran."""
        self.refused_counts[api if api == CONNECTION else self._api(api), str(status)] += 1

    def count_bad_connection(self, status: int) -> None:
        """Count a connection without a complete or valid HTTP request."""
        self.count_refused(CONNECTION, status)

    def _api(self, api: str) -> str:
        if api not in self.first_token_times:
            api = api if len(self.first_token_times) < MAX_NAMES else OTHER
            if api not in self.first_token_times:
                self.first_token_times[api], self.request_times[api] = Histogram(LONG_S), Histogram(LONG_S)
                self.inter_token_times[api] = Histogram(SHORT_S)
        return api

    def _model(self, model: str) -> str:
        if model not in self._models:
            if len(self._models) >= MAX_NAMES:
                return OTHER
            self._models.add(model)
        return model

    # --- collecting --------------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        ended = CounterMetricFamily(
            "swarm_http_requests_total", "Answered requests, by outcome", labels=LABEL_NAMES["outcome"]
        )
        for labels, count in self.ended_counts.items():
            ended.add_metric(labels, count)
        yield ended
        turned_away = CounterMetricFamily(
            "swarm_http_refused_total", "Requests answered with an error before anything ran", labels=("api", "status")
        )
        for pair, count in self.refused_counts.items():
            turned_away.add_metric(pair, count)
        yield turned_away
        upstream = CounterMetricFamily(
            "swarm_http_upstream_requests_total",
            "Requests passed to other servers, by outcome",
            labels=("upstream", "outcome"),
        )
        for pair, count in self.upstream_counts.items():
            upstream.add_metric(pair, count)
        yield upstream
        tokens = CounterMetricFamily(
            "swarm_http_tokens_total",
            "Tokens of ended requests: of prompts, of prompts in the prefix cache, of answers",
            labels=LABEL_NAMES["kind"],
        )
        for labels, count in self.token_counts.items():
            tokens.add_metric(labels, count)
        yield tokens
        under_way = GaugeMetricFamily(
            "swarm_http_open_requests", "Requests being answered, including streams", labels=("api",)
        )
        for api, count in self.open_requests.items():
            under_way.add_metric((api,), count)
        yield under_way
        yield from self._collect_times()

    def _collect_times(self) -> Iterator[Metric]:
        for name, text, histograms in (
            ("first_token", "Seconds from a request's arrival to its first token", self.first_token_times),
            (
                "inter_token",
                "Seconds between two tokens of a request, as its client receives them",
                self.inter_token_times,
            ),
            ("request", "Seconds from a request's arrival to its end, with any outcome", self.request_times),
        ):
            values = [((api,), histogram.report()) for api, histogram in histograms.items()]
            yield build_histogram(f"swarm_http_{name}_seconds", text, ("api",), values)


LABEL_NAMES = {last: ("api", "model", last) for last in ("outcome", "kind")}


class GatewayProcess(Collector):
    """Collector of the gateway process's figures. Unreadable ones, as when no descriptor is left, are left out."""

    def __init__(self) -> None:
        self._process = psutil.Process()

    def collect(self) -> Iterator[Metric]:
        try:
            with self._process.oneshot():
                resident = self._process.memory_info().rss
                times = self._process.cpu_times()
                descriptors, threads = self._process.num_fds(), self._process.num_threads()
        except (OSError, psutil.Error):
            return
        yield GaugeMetricFamily("swarm_gateway_resident_bytes", "Memory of the gateway's process", resident)
        yield CounterMetricFamily(
            "swarm_gateway_cpu_seconds_total", "Processor time of the gateway's process", times.user + times.system
        )
        yield GaugeMetricFamily("swarm_gateway_descriptors", "Descriptors that the gateway has open", descriptors)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        yield GaugeMetricFamily("swarm_gateway_descriptor_limit", "Descriptors that the gateway may have open", limit)
        yield GaugeMetricFamily("swarm_gateway_threads", "Threads of the gateway's process", threads)
