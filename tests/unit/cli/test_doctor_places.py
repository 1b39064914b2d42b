"""Where ``swarm doctor`` looks: if units of systemd are installed, at what they use, unless a place is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm.auth.memberships import default_state_dir
from swarm.cli.doctor import facts, paths
from swarm.cli.doctor.paths import ServicePaths, choose_paths, find_units
from swarm.cli.main import run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An image in which units are installed, and a swarm has run."""
    (tmp_path / "opt/swarm/bin").mkdir(parents=True)
    assert run(["systemd", "install", "--root", str(tmp_path)]) == 0
    (tmp_path / "var/lib/swarm/broker").mkdir(parents=True)
    (tmp_path / "var/lib/swarm/workers/joined").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def of_image(root: Path, monkeypatch: pytest.MonkeyPatch) -> ServicePaths:
    """The image's are this machine's."""
    found = find_units(root)
    assert found is not None
    monkeypatch.setattr(paths, "find_units", lambda: found)
    monkeypatch.delenv("SWARM_CONFIG", raising=False)
    monkeypatch.delenv("SWARM_STATE_DIR", raising=False)
    monkeypatch.chdir(root)
    return found


def test_the_places_of_units(root: Path, tmp_path: Path) -> None:
    settings, state = root / "etc/swarm/swarm.toml", root / "var/lib/swarm"
    assert find_units(root) == ServicePaths(settings, state, is_of_units=True)
    settings.unlink()
    assert find_units(root) == ServicePaths(None, state, is_of_units=True)
    assert find_units(root / "var", root / "nobody") is None


def test_the_places_of_a_users_own_units(tmp_path: Path) -> None:
    """Older ones of systemd keep state beside the settings."""
    home = tmp_path / "home"
    units = home / ".config/systemd/user"
    units.mkdir(parents=True)
    (units / "swarm-broker.service").touch()
    assert find_units(tmp_path, home) == ServicePaths(None, default_state_dir(), is_of_units=True)
    (home / ".config/swarm/broker").mkdir(parents=True)
    assert find_units(tmp_path, home) == ServicePaths(None, home / ".config/swarm", is_of_units=True)


def test_who_names_a_place_means_that_one(
    of_image: ServicePaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.toml"
    own.touch()
    assert choose_paths(None, None) == choose_paths(of_image.settings, None) == of_image
    assert choose_paths(own, None) == ServicePaths(own, None)
    assert choose_paths(None, tmp_path) == ServicePaths(of_image.settings, tmp_path)
    monkeypatch.setenv("SWARM_STATE_DIR", str(tmp_path))
    assert choose_paths(None, None) == ServicePaths(of_image.settings, None)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, str]]:
    capsys.readouterr()
    run(["doctor", "--json", *words])
    return {each["about"]: each for each in json.loads(capsys.readouterr().out)["findings"]}


def test_keys_and_settings_of_units_are_looked_at(of_image: ServicePaths, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a word, and with their directory named; the state is that of the broker, which has the journal."""
    assert of_image.settings is not None
    assert of_image.state is not None
    of_image.settings.write_text("[broker]\nport = 5988\n")
    key = of_image.state / "workers/joined/5f.json"
    key.touch(mode=0o600)
    assert "keys" not in told(capsys)
    key.chmod(0o644)
    for words in ((), ("--state-dir", str(of_image.state))):
        found = told(capsys, *words)
        assert f"others may read {key}" in found["keys"]["text"]
        assert found["state"]["text"].startswith(f"{of_image.state}/broker has ")
        assert "5988" in found["port"]["text"]


def test_state_that_only_others_may_see_is_no_trouble(
    of_image: ServicePaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An ordinary user can't write where units do, and need not: it is said who can look. Nor is it looked what they
    have joined."""
    assert of_image.state is not None
    (of_image.state / "workers/joined/5f.json").write_text("rubbish")
    assert "5f.json" in told(capsys)["broker"]["text"]
    monkeypatch.setattr(facts.os, "access", lambda *_: False)
    found = told(capsys)
    assert "broker" not in found
    assert (found["state"]["level"], found["state"]["remedy"]) == ("note", "sudo swarm doctor")
