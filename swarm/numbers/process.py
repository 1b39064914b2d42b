"""What the gateway's own process takes: memory, processor time, descriptors."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class GatewayProcess(Collector):
    """Looks when it is asked. What can't be read, as when no descriptor is left for it, is left out."""

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
