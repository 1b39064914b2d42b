"""``swarm sim``: what it prints, and how it ends."""

from __future__ import annotations

import json

import pytest

from swarm.broker.requests.tokens import TokenCollector
from swarm.cli import sim
from swarm.cli.main import run
from swarm.sim.run import run as run_seed


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that never learns that its journal has written: many requests are never told."""
    monkeypatch.setattr(TokenCollector, "on_committed", lambda self, committed: None)


def test_one_seed(capsys: pytest.CaptureFixture[str]) -> None:
    """It says what was played and that all held."""
    assert run(["sim", "--seed", "3"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("seed 3: ")
    assert second == "everything held"


def test_one_seed_that_fails_tells_its_story(broken: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The story comes first, then what it was, then one line on stderr with the broken rule; exit code 1."""
    assert run(["sim", "--seed", "3"]) == 1
    printed = capsys.readouterr()
    *story, summary = printed.out.splitlines()
    assert len(story) > 50
    assert summary.startswith("seed 3: ")
    assert printed.err.startswith("swarm sim: Violation: I1: ")


@pytest.mark.slow
def test_many_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Counts over all schedules, from the first seed on."""
    assert run(["sim", "--schedules", "3", "--first-seed", "10", "--no-faults", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_schedules"], found["first_seed"], found["faults"], found["violations"]) == (3, 10, False, [])
    assert found["num_tokens"] > 0
    assert found["num_restarts"] == 0


@pytest.mark.slow
def test_many_tell_what_struck(capsys: pytest.CaptureFixture[str]) -> None:
    """How often each kind of fault was played, for people and in JSON."""
    assert run(["sim", "--schedules", "6"]) == 0
    told = capsys.readouterr().out.splitlines()[1]
    assert run(["sim", "--schedules", "6", "--json"]) == 0
    faults = json.loads(capsys.readouterr().out)["struck"]
    assert faults
    assert told == "faults: " + ", ".join(f"{kind} {num}" for kind, num in sorted(faults.items()))


@pytest.mark.slow
def test_many_with_violations(broken: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with its seed, and the command that tells the first one's story; exit code 1."""
    assert run(["sim", "--schedules", "2", "--first-seed", "27", "--no-faults"]) == 1
    printed = capsys.readouterr()
    assert "2 schedules, " in printed.out
    assert "2 violations" in printed.out
    lines = printed.err.splitlines()
    assert [line.partition(" Violation")[0] for line in lines[:2]] == ["swarm sim: seed 27:", "swarm sim: seed 28:"]
    assert lines[2] == "swarm sim: 2 of 2 schedules broke a rule: 'swarm sim --seed 27 --no-faults' shows the first"


@pytest.mark.slow
def test_further_parts_are_simulated_on_request() -> None:
    [plain], [drafted] = sim._run_chunk((3, 1, True, ())), sim._run_chunk((3, 1, True, (sim.Extra.drafts,)))
    assert plain != drafted == run_seed(3, drafts=True)


def test_many_processes_give_the_same_in_order() -> None:
    """Spread over fresh processes: the outcomes are those of one, in the order of the seeds."""
    spread = [o for part in sim.run_seeds(0, sim.CHUNK + 1, False) for o in part]
    assert [o.seed for o in spread] == list(range(sim.CHUNK + 1))
    assert spread[-1] == sim._run_chunk((sim.CHUNK, 1, False, ()))[0]


@pytest.mark.parametrize(
    "arguments", [["--seed", "1", "--schedules", "2"], ["--seed", "-1"], ["--schedules", "0"], ["--seed", "x"]]
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, exit code 2."""
    assert run(["sim", *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
