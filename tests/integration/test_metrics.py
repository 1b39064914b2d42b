"""Numbers of a real swarm: every name that is served is explained, every name that is asked for is served, and values
are right. Dashboard and alert rules are checked against the same names."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from swarm import AsyncClient
from swarm.metrics.exposition import render
from swarm.metrics.http import HttpMetrics
from swarm.stage.engine import gpu_load
from swarm.stage.engine.device import memory_stats
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes

ROOT = Path(__file__).parents[2]
RULES = ROOT / "config" / "prometheus" / "swarm.rules.yml"
SCRAPE = ROOT / "config" / "prometheus" / "prometheus.yml"
DASHBOARD = ROOT / "config" / "grafana" / "swarm.json"
DOCUMENT = ROOT / "docs" / "reference" / "metrics.md"
RULE_TESTS = ROOT / "tests" / "unit" / "metrics" / "swarm.rules.test.yml"

NAME = re.compile(r"\bswarm_[a-z_]+[a-z]\b")
PARTS = re.compile(r"_(bucket|sum|count)$")
SHARED = [(11 * i) % 90 + 3 for i in range(100)]
# What only comes into being when it happens.
RARE = {"swarm_rejected_total"}

Values = dict[tuple[str, ...], float]


@pytest.fixture(scope="module")
def swarm(random_llama: Path, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folders = {name: str(tmp_path_factory.mktemp(name)) for name in ("state", "cache")}
    options = {"SWARM_STATE_DIR": folders["state"], "SWARM_CACHE": folders["cache"], "SWARM_WORKER__SPILL": "64MiB"}
    with Processes(random_llama, tmp_path_factory.mktemp("logs"), options=options, launch=zygote) as processes:
        processes.start(3)
        yield processes


@pytest.fixture
async def client(swarm: Processes) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
        await swarm.until_serving(client, 3)
        yield client


def gateway() -> HttpMetrics:
    """A gateway that has served something."""
    numbers = HttpMetrics()
    watch = numbers.start_request("chat", "village")
    watch.on_tokens(2)
    watch.finish("stop", 3, 0, 2)
    numbers.count_refused("chat", 429)
    return numbers


async def scraped(client: AsyncClient) -> str:
    text, _ = await render(client.query, gateway(), deadline_s=30)
    return text.decode()


def values(text: str) -> Values:
    """By name and labels, these in the order of their names."""
    families = text_string_to_metric_families(text)
    return {(s.name, *(s.labels[k] for k in sorted(s.labels))): s.value for family in families for s in family.samples}


def families(text: str) -> set[str]:
    """The names as they are documented: a histogram's is that of its buckets without the ending."""
    found = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            found.add(line.split()[2])
    return found


async def until(client: AsyncClient, holds: Any) -> Values:
    """Workers and the journal tell their figures each second."""
    async with asyncio.timeout(60):
        while True:
            found = values(await scraped(client))
            if holds(found):
                return found
            await asyncio.sleep(0.2)


def asked_for(text: str) -> set[str]:
    return {PARTS.sub("", name) for name in NAME.findall(text)}


@pytest.fixture
def gpu_figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What a worker reports of a GPU. The answers of torch and the driver are made up, since few machines have one."""
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 1 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1 << 34))
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 75)
    monkeypatch.setattr(gpu_load, "pynvml", SimpleNamespace(NVMLError=OSError))
    return memory_stats(torch.device("cuda", 0))


async def test_what_is_served_is_explained_and_what_is_explained_is_served(
    client: AsyncClient, gpu_figures: dict[str, float]
) -> None:
    """Names in the document, the dashboard and the rules are those that a scrape finds, and all of them. One of the
    workers has a GPU."""

    async def query(what: Any) -> dict[str, Any]:
        answer = await client.query(what)
        if what == "stats":
            answer["stages"]["w0"] |= gpu_figures
        return answer

    await client.generate([1, 5, 9], max_tokens=200, ignore_eos=True, timeout=60)
    late = {("swarm_stage_kv_capacity_positions", "w2"), ("swarm_worker_pace_ratio", "w2")}
    await until(client, lambda found: late <= found.keys())
    text, _ = await render(query, gateway(), deadline_s=30)
    served = families(text.decode()) | RARE
    prose = asked_for(DOCUMENT.read_text())
    assert served - prose == set()
    assert prose - served == set()
    for file in (DASHBOARD, RULES, RULE_TESTS):
        used = asked_for(file.read_text())
        assert used
        assert used - served == set(), file.name


async def test_every_figure_is_a_number_with_a_text(client: AsyncClient) -> None:
    """As the parser of Prometheus' own client reads it; no sample comes twice."""
    text = await scraped(client)
    names = []
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        assert family.type in ("counter", "gauge", "histogram")
        names += [(sample.name, tuple(sorted(sample.labels.items()))) for sample in family.samples]
    assert len(names) == len(set(names))


async def test_values_are_those_of_what_was_done(client: AsyncClient) -> None:
    """Requests by outcome, tokens, what the prefix cache had, and each stage's share."""
    before = values(await scraped(client))
    for _ in range(2):
        await client.generate([*SHARED, 7], max_tokens=10, ignore_eos=True, speculation="off", timeout=60)
    await client.generate([3, 4], n=2, max_tokens=10, ignore_eos=True, speculation="off", timeout=60)

    def grown(found: Values, *key: str) -> float:
        return found[key] - before.get(key, 0)

    def all_told(found: Values) -> bool:
        steps = [grown(found, "swarm_stage_steps_total", worker) for worker in ("w0", "w1", "w2")]
        return min(steps) >= 30 and grown(found, "swarm_journal_write_seconds_count") >= 30

    found = await until(client, all_told)
    assert found["swarm_up",] == found["swarm_serving",] == 1
    assert grown(found, "swarm_requests_total", "length") == 3
    assert grown(found, "swarm_sequences_total", "length") == 4
    assert grown(found, "swarm_generated_tokens_total") == 40
    assert grown(found, "swarm_prompt_tokens_total") == 2 * 101 + 2 * 2
    assert grown(found, "swarm_cached_prompt_tokens_total") == 96
    assert grown(found, "swarm_first_token_seconds_count") == 4
    assert grown(found, "swarm_inter_token_seconds_count") == 36
    assert grown(found, "swarm_request_seconds_count") == 3
    assert 0 < grown(found, "swarm_request_seconds_sum") < 180
    for worker in ("w0", "w1", "w2"):
        assert found["swarm_worker_up", worker] == 1
        assert found["swarm_worker_layers", worker] > 0
        assert 0 < grown(found, "swarm_stage_compute_seconds_total", worker) < 60
        assert grown(found, "swarm_stage_serialize_seconds_total", "in", worker) > 0
        assert found["swarm_worker_resident_bytes", worker] > 1e6
        assert 0 < found["swarm_worker_descriptors", worker] < found["swarm_worker_descriptor_limit", worker]
        assert found["swarm_worker_cpu_seconds_total", worker] > 0
    assert grown(found, "swarm_beats_total") > 0
    assert found["swarm_broker_cpu_seconds_total",] > 0
    assert found["swarm_http_tokens_total", "chat", "answer", "village"] == 2


async def test_a_loss_is_a_recovery_with_its_parts(swarm: Processes, client: AsyncClient) -> None:
    """The dead worker is down, the epoch grows, and each part of the way back has its seconds; then one comes by its
    name, and is up."""
    before = values(await scraped(client))
    request_id = await client.submit([1, 2, 3], max_tokens=400, ignore_eos=True)
    async for piece in client.attach(request_id, timeout=60):
        if piece.index == 20:
            swarm.kill("w1")
    found = await until(client, lambda found: found["swarm_recoveries_total",] > before["swarm_recoveries_total",])
    assert found["swarm_epoch",] > before["swarm_epoch",]
    assert found["swarm_worker_up", "w1"] == 0
    assert found["swarm_worker_verdict", "dead", "w1"] == 1
    assert ("swarm_stage_log_bytes", "w1") not in found
    for part in ("detect", "plan", "load", "activate", "replay", "resume", "total"):
        assert found["swarm_recovery_seconds_count", part] > before["swarm_recovery_seconds_count", part], part
    swarm.start_worker("w1")
    found = await until(client, lambda found: found["swarm_worker_up", "w1"] == 1)
    await swarm.until_serving(client, 3)


async def test_without_a_broker_the_gateway_is_still_told(swarm: Processes) -> None:
    """A client that finds nobody doesn't hold up a scrape."""
    async with AsyncClient("tcp://127.0.0.1:1", connect_timeout_s=60) as away, asyncio.timeout(20):
        text, _ = await render(away.query, gateway(), deadline_s=0.5)
    found = values(text.decode())
    assert found["swarm_up",] == 0
    assert found["swarm_http_requests_total", "chat", "village", "stop"] == 1


def swarmctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from swarm.ctl.main import main; main()", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


async def test_swarmctl_prints_the_same(swarm: Processes, client: AsyncClient) -> None:
    """For a swarm that no gateway serves; a broker that is away is told as a number."""
    shown = await asyncio.to_thread(swarmctl, "stats", "--prometheus", "--url", swarm.url)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert values(shown.stdout)["swarm_up",] == 1
    assert families(shown.stdout) <= families(await scraped(client)) | RARE
    away = await asyncio.to_thread(swarmctl, "stats", "--prometheus", "--url", "tcp://127.0.0.1:1")
    assert (away.returncode, values(away.stdout)) == (0, {("swarm_up",): 0})
    assert "127.0.0.1:1" in away.stderr


def promtool(*arguments: str) -> None:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("needs promtool (Debian: prometheus)")
    done = subprocess.run([found, *arguments], check=False, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_alert_rules_are_valid() -> None:
    promtool("check", "rules", str(RULES))
    promtool("check", "config", str(SCRAPE))


def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", str(RULE_TESTS))


async def test_promtool_finds_nothing_wrong_with_names(client: AsyncClient) -> None:
    """Its own rules for names, units and texts."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("needs promtool (Debian: prometheus)")
    text = await scraped(client)
    done = await asyncio.to_thread(
        subprocess.run, [found, "check", "metrics"], input=text, check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_dashboard_is_whole() -> None:
    """Every panel asks something, of the source that the reader chooses; no two share a number or a place."""
    board = json.loads(DASHBOARD.read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in panels]
    assert len(set(places)) == len(places)
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "worker"}
    for panel in panels:
        if panel["type"] != "row":
            assert panel["targets"]
            assert panel["datasource"]["uid"] == "${datasource}"
            assert all(target["expr"] and target["datasource"] == panel["datasource"] for target in panel["targets"])


def test_every_expression_of_the_dashboard_can_be_parsed(tmp_path: Path) -> None:
    """By promtool, as rules, with what Grafana puts in for its variables."""
    board = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    rules = [
        {"record": f"panel:{number}", "expr": text.replace("$__rate_interval", "1m").replace("$worker", ".*")}
        for number, text in enumerate(expressions)
    ]
    file = tmp_path / "panels.yml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))  # JSON is YAML
    promtool("check", "rules", str(file))
