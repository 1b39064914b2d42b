"""Settings: sources, precedence and errors."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

from swarm import config
from swarm.errors import ConfigError
from swarm.wire.messages import KV_SHARE

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings from the machine that runs the tests."""
    for name in [name for name in os.environ if name.startswith("SWARM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def refusal(overrides: dict[str, object] | None = None, path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        config.load(path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_flags_over_environment_over_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each source overrides the one below key by key; what nobody sets keeps its default."""
    path = write(
        tmp_path / "s.toml", "[broker]\nport = 6000\nmax_queue = 7\nstep_tokens = 300\n[worker]\nmemory_limit = '2GiB'"
    )
    monkeypatch.setenv("SWARM_BROKER__PORT", "6100")
    monkeypatch.setenv("SWARM_BROKER__MAX_QUEUE", "8")
    settings = config.load(path, {"broker.port": 6200, "broker.mode": None})
    assert (settings.broker.port, settings.broker.max_queue, settings.broker.step_tokens) == (6200, 8, 300)
    assert settings.broker.mode == "auto"
    assert settings.worker.memory_limit == 2 << 30


def test_without_sources_the_defaults() -> None:
    """Nothing set anywhere is the same as Settings()."""
    assert config.load() == config.Settings()


def test_every_number_and_word_can_be_set_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables are text, also where a setting is one of a few numbers."""
    values = config.Settings().model_dump()
    for key in config.setting_names():
        value = config.get(values, key)
        if value and isinstance(value, bool | int | float | str):
            monkeypatch.setenv(f"SWARM_{key.upper().replace('.', '__')}", str(value))
    assert config.load() == config.Settings()


def test_settings_do_not_read_the_environment_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only load() reads the machine, so that a test or a program can rely on Settings()."""
    monkeypatch.setenv("SWARM_BROKER__PORT", "6100")
    assert config.Settings().broker.port == 5700


def test_file_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """--config wins over SWARM_CONFIG, which wins over config/swarm.toml under the working directory."""
    (tmp_path / "config").mkdir()
    write(tmp_path / "config" / "swarm.toml", "[broker]\nport = 6001")
    named = write(tmp_path / "named.toml", "[broker]\nport = 6002")
    assert config.load().broker.port == 6001
    monkeypatch.setenv("SWARM_CONFIG", str(named))
    assert config.load().broker.port == 6002
    assert config.load(write(tmp_path / "flag.toml", "")).broker.port == 5700


def test_swarm_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """SWARM_URL stands in for --url; the full name of the setting is stronger, a flag the strongest."""
    monkeypatch.setenv("SWARM_URL", "tcp://127.0.0.1:6000")
    assert config.load().client.url == "tcp://127.0.0.1:6000"
    monkeypatch.setenv("SWARM_CLIENT__URL", "tcp://127.0.0.1:6001")
    assert config.load().client.url == "tcp://127.0.0.1:6001"
    assert config.load(overrides={"client.url": "tcp://127.0.0.1:6002"}).client.url == "tcp://127.0.0.1:6002"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("broker.port", 65533, "less than or equal to 65532; the default is 5700"),
        ("broker.port", "many", "valid integer"),
        ("broker.mode", "fast", "'auto', 'batch' or 'overlapped'"),
        ("broker.settle_s", float("nan"), "finite number"),
        ("broker.settle_s", 0, "greater than 0"),
        ("broker.prefill_chunk", 513, "must not exceed broker.step_tokens (512)"),
        ("broker.host", "0.0.0.0", "no keys are set"),
        ("broker.host", "example", "not an IP address; use 127.0.0.1"),
        ("worker.host", "example", "not an IP address"),
        ("worker.memory_limit", "much", '"512MB"'),
        ("worker.data_ports", "30000-20000", "LOW-HIGH"),
        ("worker.device", "tpu", "cpu"),
        ("health.beat_timeout_s", 0.15, "at least twice worker.beat_interval_s (0.1)"),
        ("broker.step_tokens", 100, "at least broker.prefill_chunk (256); lower that too; the default is 512"),
        ("worker.beat_interval_s", 0.4, "at most half of health.beat_timeout_s (0.7); raise that too"),
        ("worker.kernels", "sse", "'portable' or 'torch'"),
        ("worker.bits", "slow", "'auto', 'fast' or 'portable'"),
        ("client.url", "localhost", "tcp://HOST:PORT"),
        ("client.url", "tcp://127.0.0.1:0", "tcp://HOST:PORT"),
        ("log.level", "loud", "'debug', 'info', 'warning', 'error' or 'off'"),
        ("broker", 3, "write its keys under [broker]"),
    ],
)
def test_a_wrong_value_is_explained(key: str, value: object, expected: str) -> None:
    """The error names the key, the value, where it came from and what is allowed."""
    text = refusal({key: value})
    assert f"{key} = {value!r} from the command line" in text
    assert expected in text


@pytest.mark.parametrize(
    ("values", "blamed"),
    [
        ({"worker.kernels": "amx", "worker.bits": "portable"}, "these kernels have bits of their own"),
        ({"worker.kernels": "avx512bf16", "worker.bits": "portable"}, "name avx512, avx2, neon or portable"),
        ({"worker.kernels": "torch", "worker.bits": "portable"}, "these kernels have bits of their own"),
        ({"worker.bits": "portable", "worker.device": "cuda"}, "only CPUs have portable bits; choose fast"),
        ({"worker.dtype": "float16"}, "a CPU computes in float32 or bfloat16; choose one, or auto"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(value.values()),
)
def test_kernels_and_bits_that_contradict_each_other(values: dict[str, object], blamed: str) -> None:
    """Portable bits can't be had of kernels that have others, nor on a device."""
    assert blamed in refusal(values)


def test_kernels_and_bits_that_agree() -> None:
    """The family's by name, and any kernels with the quickest ones' bits."""
    for kernels in ("auto", "avx512", "avx2", "neon", "portable"):
        assert config.load(overrides={"worker.kernels": kernels, "worker.bits": "portable"}).worker.kernels == kernels
    for kernels in ("amx", "torch", "portable"):
        assert config.load(overrides={"worker.kernels": kernels, "worker.bits": "fast"}).worker.bits == "fast"


def test_errors_name_their_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A value from the file is blamed on the file, a value from the environment on the environment."""
    path = write(tmp_path / "s.toml", "[broker]\nport = 70000")
    assert f"broker.port = 70000 from the file {path}" in refusal(path=path)
    monkeypatch.setenv("SWARM_BROKER__PORT", "x")
    assert "broker.port = 'x' from the environment variable SWARM_BROKER__PORT is wrong" in refusal(path=path)
    monkeypatch.setenv("SWARM_BROKER__PORT", "5800")
    monkeypatch.setenv("SWARM_URL", "here")
    assert "client.url = 'here' from the environment variable SWARM_URL is wrong" in refusal()
    monkeypatch.setenv("SWARM_CLIENT__URL", "there")
    assert "client.url = 'there' from the environment variable SWARM_CLIENT__URL is wrong" in refusal()
    monkeypatch.setenv("SWARM_CLIENT__URL", "tcp://127.0.0.1:1")
    monkeypatch.setenv("SWARM_HEALTH", '{"hang_factor": 0}')
    assert "health.hang_factor = 0 from the environment variable SWARM_HEALTH is wrong" in refusal()


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("port = 5", "no setting port (from the file FILE); did you mean broker.port or gateway.port?"),
        ("[broker]\nthreads = 2", "did you mean worker.threads?"),
        ("[log]\nhost = '::1'", "did you mean broker.host or gateway.host or worker.host?"),
        ("[helth]\nbeat_timeout_s = 1", "did you mean health?"),
        ("[zzz]\nqqq = 1", "`python -m swarm.config` lists all settings"),
    ],
)
def test_a_key_in_the_wrong_place_is_shown_the_right_one(tmp_path: Path, text: str, remedy: str) -> None:
    """A key that exists, but elsewhere; a section that is misspelt; and what resembles nothing."""
    path = write(tmp_path / "s.toml", text)
    assert remedy.replace("FILE", str(path)) in refusal(path=path)


def test_variables_that_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours for other things; they are no unknown settings."""
    for name in sorted(config.OTHER_VARIABLES - {"SWARM_CONFIG", "SWARM_URL"}):
        monkeypatch.setenv(name, "/somewhere")
    assert config.load() == config.Settings()


def test_every_wrong_number_and_word_is_explained(tmp_path: Path) -> None:
    """Whatever setting has a value of an impossible kind: one sentence with key, value, origin and remedy."""
    for key in config.setting_names():
        section, _, name = key.rpartition(".")
        path = write(tmp_path / "s.toml", f"[{section}]\n{name} = [[1]]" if section else f"{name} = [[1]]")
        text = refusal(path=path)
        assert text.startswith(f"the setting {key}"), text
        assert f"from the file {path} is wrong: " in text


def test_unknown_keys_are_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A misspelt key in any source is refused, with the nearest key there is."""
    assert "no setting broker.prot (from the command line); did you mean broker.port?" in refusal({"broker.prot": 1})
    path = write(tmp_path / "s.toml", "[brokr]\nport = 1")
    assert f"no setting brokr (from the file {path}); did you mean broker?" in refusal(path=path)
    monkeypatch.setenv("SWARM_HEALTH__BEAT_TIMEOUT", "1")
    assert "did you mean health.beat_timeout_s?" in refusal()
    monkeypatch.delenv("SWARM_HEALTH__BEAT_TIMEOUT")
    monkeypatch.setenv("SWARM_MODLE", "x")
    assert "no setting modle (from the environment variable SWARM_MODLE); did you mean model?" in refusal()


def test_a_section_in_one_variable_must_be_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can't be read at all is refused in one sentence too."""
    monkeypatch.setenv("SWARM_BROKER", "{")
    assert "set single keys instead" in refusal()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file and one that is not TOML are named."""
    assert f"{tmp_path / 'none.toml'} can't be read (No such file" in refusal(path=tmp_path / "none.toml")
    assert "is not valid TOML" in refusal(path=write(tmp_path / "s.toml", "[broker\n"))


def test_a_file_that_begins_with_the_mark_of_its_encoding(tmp_path: Path) -> None:
    """As some editors write it."""
    (tmp_path / "s.toml").write_text("[broker]\nport = 5900\n", encoding="utf-8-sig")
    assert config.load(tmp_path / "s.toml").broker.port == 5900


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    """Every loopback address may be used without keys."""
    assert config.load(overrides={"broker.host": host}).broker.host == host


@pytest.mark.parametrize(("text", "expected"), [("512MB", 512_000_000), ("2GiB", 2 << 30), (1024, 1024)])
def test_sizes_may_be_written_with_units(text: object, expected: int) -> None:
    """Sizes are numbers of bytes, or text with a decimal or binary unit."""
    assert config.load(overrides={"worker.log_bytes": text}).worker.log_bytes == expected


def test_every_setting_is_described() -> None:
    """Every field has a description: unit, default and reason are what the file shows."""
    for name, field in config.Settings.model_fields.items():
        fields = type(field.default).model_fields if isinstance(field.default, config.Section) else {name: field}
        for key, inner in fields.items():
            assert inner.description, key


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("broker.listen", "127.0.0.1", "can't be reached from another machine"),
        ("broker.listen", "::", "can't be reached from another machine"),
        ("broker.listen", "a b", "neither an IP address nor a network interface"),
        ("broker.advertise", "tcp://x:1", "HOST or HOST:PORT"),
    ],
)
def test_places_for_other_machines_must_be_some(key: str, value: str, expected: str) -> None:
    """Each of a list is looked at."""
    text = refusal({key: ["192.0.2.1", value]})
    assert f"{key}.1 = {value!r}" in text
    assert expected in text


def test_the_file_in_the_repository_is_the_template() -> None:
    """config/swarm.toml names every setting; ``python -m swarm.config`` writes it anew."""
    assert (REPOSITORY / "config" / "swarm.toml").read_text() == config.template()


def test_the_file_shows_the_true_defaults() -> None:
    """With every key uncommented, the file says exactly what holds without it (examples stand for unset ones)."""
    text = re.sub(r"^# (\w+ = )", r"\1", config.template(), flags=re.MULTILINE)
    shown = tomllib.loads(text)
    assert sorted(_names(shown)) == sorted(_names(config.Settings().model_dump()))
    assert shown.pop("model")
    assert shown.pop("state_dir")
    assert shown["broker"].pop("draft")
    assert shown["worker"].pop("memory_limit")
    assert shown["gateway"].pop("keys_file")
    assert shown["gateway"].pop("traces")
    assert shown["gateway"].pop("default_max_tokens")
    assert config.Settings(**shown) == config.Settings()


def _names(tree: dict[str, object]) -> list[str]:
    """Keys with their section's name."""
    names = []
    for key, value in tree.items():
        names += [f"{key}.{inner}" for inner in value] if isinstance(value, dict) else [key]
    return names


def test_a_worker_s_share_for_keys_and_values_is_what_one_is_believed_to_give_that_says_nothing() -> None:
    """The number stands in two rooms, so that settings need not know of messages."""
    assert config.Settings().worker.kv_share == KV_SHARE
