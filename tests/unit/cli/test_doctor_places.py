"""Where ``swarm doctor`` looks: if units of systemd are installed, at what they use, unless a place is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm.cli.doctor import facts, places
from swarm.cli.doctor.places import Places, meant, of_units
from swarm.cli.main import run
from swarm.lock.known import default_state_dir


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An image in which units are installed, and a swarm has run."""
    (tmp_path / "opt/swarm/bin").mkdir(parents=True)
    assert run(["systemd", "install", "--root", str(tmp_path)]) == 0
    (tmp_path / "var/lib/swarm/broker").mkdir(parents=True)
    (tmp_path / "var/lib/swarm/workers/joined").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def of_image(root: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """The image's are this machine's."""
    found = of_units(root)
    assert found is not None
    monkeypatch.setattr(places, "of_units", lambda: found)
    monkeypatch.delenv("SWARM_CONFIG", raising=False)
    monkeypatch.delenv("SWARM_STATE_DIR", raising=False)
    monkeypatch.chdir(root)
    return found


def test_the_places_of_units(root: Path, tmp_path: Path) -> None:
    settings, state = root / "etc/swarm/swarm.toml", root / "var/lib/swarm"
    assert of_units(root) == Places(settings, state, is_of_units=True)
    settings.unlink()
    assert of_units(root) == Places(None, state, is_of_units=True)
    assert of_units(root / "var", root / "nobody") is None


def test_the_places_of_a_users_own_units(tmp_path: Path) -> None:
    """Older ones of systemd keep state beside the settings."""
    home = tmp_path / "home"
    units = home / ".config/systemd/user"
    units.mkdir(parents=True)
    (units / "swarm-broker.service").touch()
    assert of_units(tmp_path, home) == Places(None, default_state_dir(), is_of_units=True)
    (home / ".config/swarm/broker").mkdir(parents=True)
    assert of_units(tmp_path, home) == Places(None, home / ".config/swarm", is_of_units=True)


def test_who_names_a_place_means_that_one(of_image: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.toml"
    own.touch()
    assert meant(None, None) == meant(of_image.settings, None) == of_image
    assert meant(own, None) == Places(own, None)
    assert meant(None, tmp_path) == Places(of_image.settings, tmp_path)
    monkeypatch.setenv("SWARM_STATE_DIR", str(tmp_path))
    assert meant(None, None) == Places(of_image.settings, None)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, str]]:
    capsys.readouterr()
    run(["doctor", "--json", *words])
    return {each["about"]: each for each in json.loads(capsys.readouterr().out)["findings"]}


def test_keys_and_settings_of_units_are_looked_at(of_image: Places, capsys: pytest.CaptureFixture[str]) -> None:
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
    of_image: Places, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
