"""By which settings a process runs: a worker's as it told them, the broker's by its own process; for admins alone."""

from __future__ import annotations

import pytest

from swarm.auth.permissions import deny_reason
from swarm.broker.actions import SendToClient, ShowOwnSettings
from swarm.broker.events import ClientMessageReceived
from swarm.wire.messages import Report, Setting, ShowSettings
from tests.unit.broker.bench import CLIENT, Bench

TOLD = (Setting("worker.threads", "3", "the command line"), Setting("worker.bits", '"auto"', "the defaults"))


def answered(bench: Bench, worker: str) -> Report:
    (said,) = [
        action for action in bench.feed(ClientMessageReceived(CLIENT, ShowSettings(worker=worker))) if is_said(action)
    ]
    assert isinstance(said, SendToClient)
    assert isinstance(said.message, Report)
    return said.message


def is_said(action: object) -> bool:
    return isinstance(action, SendToClient)


def test_a_worker_s_are_those_that_it_told(bench: Bench) -> None:
    worker = bench.add("w0")
    bench.tell("w0", worker.hello(settings=(*TOLD, Setting("worker.name", "no JSON", "the defaults"))))
    report = answered(bench, "w0")
    assert (report.what, report.ok, report.body["process"]) == ("settings", True, "w0")
    assert report.body["settings"] == [
        {"name": "worker.threads", "value": 3, "from": "the command line"},
        {"name": "worker.bits", "value": "auto", "from": "the defaults"},
        {"name": "worker.name", "value": "no JSON", "from": "the defaults"},
    ]


def test_the_broker_s_own_are_told_by_its_process(serving: Bench) -> None:
    """The core knows what it needs of them, and that is not all."""
    assert ShowOwnSettings(CLIENT) in serving.feed(ClientMessageReceived(CLIENT, ShowSettings()))


@pytest.mark.parametrize(
    ("worker", "says"),
    [("w9", "no worker 'w9': the workers are w0, w1"), ("w0", "w0 runs an older version, which does not report its")],
)
def test_what_can_not_be_told_is_refused_in_words(serving: Bench, worker: str, says: str) -> None:
    report = answered(serving, worker)
    assert not report.ok
    assert says in str(report.body["error"])


def test_only_admins_ask() -> None:
    for role in ("client", "gateway", "worker"):
        assert "may not ask for settings" in deny_reason(role, ShowSettings())
    assert not deny_reason("admin", ShowSettings())
