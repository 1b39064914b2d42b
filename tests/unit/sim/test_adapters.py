"""Adapters that are loaded and dropped in whole swarms with accidents: each request has the content that its name stood
for when it was accepted."""

from __future__ import annotations

import pytest

from swarm.broker.members.adapters import AdapterManager
from swarm.broker.requests.requests import RequestHandler
from swarm.broker.state.adapters import AdapterState
from swarm.broker.state.prefix import PrefixIndex
from swarm.sim.run import run
from swarm.stage.sequences import SequenceStore
from tests.unit.sim.groups import NUM, with_and_without_disks


@pytest.mark.parametrize(
    "first_seed", [0, *(pytest.param(first, marks=pytest.mark.long) for first in (20, 40, 60, 80))]
)
@with_and_without_disks
def test_accidents_beside_adapters(first_seed: int, spills: bool) -> None:
    """Names are dropped and loaded again with other contents while requests have them and processes die."""
    played = [run(seed, adapters=True, spills=spills) for seed in range(first_seed, first_seed + NUM)]
    assert [(o.seed, o.failure) for o in played if o.failure] == []
    assert sum(o.num_loaded for o in played) > 2 * NUM
    assert sum(o.num_adapted for o in played) > NUM


def _adapters_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A stage computes rows without their adapters."""
    patch.setattr(SequenceStore, "adapters", lambda self, rows: ())


def _prefixes_mixed(patch: pytest.MonkeyPatch) -> None:
    """Prompts that begin alike share positions, whatever their adapters."""
    find, record = PrefixIndex.find, PrefixIndex.record
    patch.setattr(PrefixIndex, "find", lambda self, tokens, adapter="": find(self, tokens))
    patch.setattr(
        PrefixIndex, "record", lambda self, number, tokens, position, adapter="": record(self, number, tokens, position)
    )


def _dropped_at_once(patch: pytest.MonkeyPatch) -> None:
    """A dropped adapter goes while requests have it."""
    patch.setattr(AdapterManager, "_is_used", lambda self, adapter: False)


def _not_restored(patch: pytest.MonkeyPatch) -> None:
    """A restarted broker has no adapters."""
    patch.setattr(AdapterManager, "restore", lambda self, snapshot: None)


def _chosen_early(patch: pytest.MonkeyPatch) -> None:
    """A name stands for what it meant before the journal was asked for the request."""
    submit, resolve = RequestHandler.submit, AdapterState.resolve

    def submit_resolved(self: RequestHandler, client: bytes, message: object, *rest: object) -> None:
        submit(self, client, resolve(self._state.adapters, message), *rest)  # type: ignore[arg-type]

    patch.setattr(RequestHandler, "submit", submit_resolved)
    patch.setattr(AdapterState, "resolve", lambda self, message: message)


@pytest.mark.parametrize(
    "sabotage", [_adapters_forgotten, _prefixes_mixed, _dropped_at_once, _not_restored, _chosen_early]
)
def test_a_broken_rule_of_adapters_is_noticed(sabotage: object, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch)  # type: ignore[operator]
    failures = (run(seed, adapters=True).failure for seed in range(2 * NUM))
    assert next((failure for failure in failures if failure is not None), "")
