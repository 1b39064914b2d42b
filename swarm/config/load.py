"""Loading of the settings from file, environment and flags. An error names key, value, origin and remedy."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource, SettingsError

from swarm.config.sections import Settings, defaults, get, sections, setting_names
from swarm.config.values import is_loopback
from swarm.errors import ConfigError

DEFAULT_FILE = Path("config/swarm.toml")
OTHER_VARIABLES = frozenset(
    {"SWARM_CONFIG", "SWARM_URL", "SWARM_CACHE", "SWARM_INVITATION", "SWARM_PARENT_FD"}
    | {"SWARM_FAILPOINTS", "SWARM_FAILPOINTS_TRACE", "SWARM_FAILPOINTS_FROM"}
)  # our variables that are not settings
_ENVIRONMENT = "the environment"
DEFAULTS = "the defaults"  # the origin of a value that is not set


@dataclass(frozen=True, slots=True)
class _Layer:
    """Values from one source, as a tree."""

    source: str
    values: dict[str, Any]


def load(path: Path | str | None = None, overrides: Mapping[str, object] | None = None) -> Settings:
    """Load the settings of this process.

    ``path`` is the file (``--config``). ``overrides`` are flags by dotted key, ``{"broker.port": 5800}``; None: the
    flag was not given. Raises :class:`ConfigError`.
    """
    return _validate(_layers(path, overrides))


def load_file(path: Path) -> Settings:
    """Load the settings from this file alone, for another process. Raises ConfigError."""
    return _validate([_read_file(path)])


def origins(
    path: Path | str | None = None, overrides: Mapping[str, object] | None = None
) -> dict[str, tuple[object, str]]:
    """Return each setting's value, ready for JSON, and its origin as text. Parameters and errors are those of
    :func:`load`."""
    layers = _layers(path, overrides)
    values = _validate(layers).model_dump(mode="json")
    return {name: (get(values, name), _origin(name, layers)) for name in setting_names()}


def _layers(path: Path | str | None, overrides: Mapping[str, object] | None) -> list[_Layer]:
    return [_read_file(path), _read_environment(), _read_flags(overrides or {})]


def _validate(layers: list[_Layer]) -> Settings:
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = _merge(merged, layer.values)
    try:
        settings = Settings(**merged)
    except ValidationError as error:
        raise ConfigError(_explain(error.errors()[0], layers)) from None
    for rule in _broken_rules(settings):
        key = next(key for key in rule if get(merged, key) is not None)  # the defaults satisfy every rule
        raise ConfigError(_error_text(key, get(merged, key), rule[key], layers))
    return settings


def file_in_use(path: Path | str | None = None) -> Path | None:
    """Return the file that :func:`load` reads, if any."""
    chosen = path or os.environ.get("SWARM_CONFIG")
    if chosen is None and not DEFAULT_FILE.is_file():
        return None
    return Path(chosen or DEFAULT_FILE).expanduser()


def _read_file(path: Path | str | None) -> _Layer:
    file = file_in_use(path)
    if file is None:
        return _Layer("no file", {})
    try:
        return _Layer(f"the file {file}", tomllib.loads(file.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise ConfigError(f"the settings file {file} can't be read ({error.strerror}); name another one") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the settings file {file} is not valid TOML ({error}); correct it there") from None


def _read_environment() -> _Layer:
    for variable in sorted(os.environ):
        section, *keys = variable.removeprefix("SWARM_").lower().split("__")
        if variable.startswith("SWARM_") and variable not in OTHER_VARIABLES and section not in Settings.model_fields:
            raise ConfigError(_unknown_text(".".join([section, *keys]), f"the environment variable {variable}"))
    try:
        values = EnvSettingsSource(Settings, env_nested_delimiter="__", env_ignore_empty=True)()
    except SettingsError as error:
        raise ConfigError(f"the environment sets a whole section wrongly ({error}); set single keys instead") from None
    url = os.environ.get("SWARM_URL")
    return _Layer(_ENVIRONMENT, _merge({"client": {"url": url}} if url else {}, values))


def _read_flags(overrides: Mapping[str, object]) -> _Layer:
    values: dict[str, Any] = {}
    for key, value in overrides.items():
        if value is not None:
            section, dot, name = key.partition(".")
            values = _merge(values, {section: {name: value}} if dot else {section: value})
    return _Layer("the command line", values)


def _merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``high`` over ``low``, tables key by key."""
    merged = dict(low)
    for key, value in high.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _broken_rules(settings: Settings) -> Iterator[dict[str, str]]:
    """Yield the violated rules between settings: for each key, the error. The first key that is set gets the blame."""
    chunk, step = settings.broker.prefill_chunk, settings.broker.step_tokens
    if chunk > step:
        yield {
            "broker.prefill_chunk": f"it must not exceed broker.step_tokens ({step})",
            "broker.step_tokens": f"it must be at least broker.prefill_chunk ({chunk}); lower that too",
        }
    worker = settings.worker
    if worker.bits == "portable":
        if worker.kernels in ("amx", "avx512bf16", "neonbf16", "torch"):
            yield {
                "worker.kernels": "these kernels have bits of their own for bfloat16, and worker.bits is portable; "
                "name avx512, avx2, neon or portable, or leave the choice to auto",
                "worker.bits": f"worker.kernels = {worker.kernels!r} have bits of their own for bfloat16; choose "
                "fast, or other kernels",
            }
        if worker.device not in ("cpu", "auto"):
            yield {
                "worker.bits": f"worker.device is {worker.device}, and only CPUs have portable bits; choose fast",
                "worker.device": "only CPUs have portable bits, and worker.bits is portable; choose cpu",
            }
    if worker.dtype == "float16" and worker.device == "cpu":
        yield {
            "worker.dtype": "a CPU computes in float32 or bfloat16; choose one, or auto: files of float16 are then "
            "computed in float32, with the same values",
            "worker.device": "a CPU does not compute in float16, and worker.dtype is float16; choose cuda",
        }
    own = settings.gateway
    if not is_loopback(own.host) and own.keys_file is None:
        yield {
            "gateway.host": "other machines can reach it, and without keys only this machine is served; set "
            "gateway.keys_file, and make a key with swarmctl keys add",
        }
    for upstream in settings.upstream:
        if upstream.key_env and upstream.key_file:
            yield {"upstream": f"{upstream.url} has both key_env and key_file; keep one"}
    timeout, interval = settings.health.beat_timeout_s, settings.worker.beat_interval_s
    if timeout < 2 * interval:
        yield {
            "health.beat_timeout_s": f"it must be at least twice worker.beat_interval_s ({interval})",
            "worker.beat_interval_s": f"it must be at most half of health.beat_timeout_s ({timeout}); raise that too",
        }


# --- errors -----------------------------------------------------------------------------------------------------------


def _explain(error: ErrorDetails, layers: list[_Layer]) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return _unknown_text(key, _origin(key, layers))
    if error["type"] == "model_type":
        place = f"[[{key.partition('.')[0]}]]" if "." in key else f"[{key}]"
        return _error_text(key, error["input"], f"it is a section; write its keys under {place}", layers)
    problem = error["msg"][:1].lower() + error["msg"][1:]
    if error["type"] == "value_error":
        problem = str(error["ctx"]["error"])
    elif error["type"].startswith("byte_size"):
        problem = 'write a number of bytes, or text such as "512MB" or "2GiB"'
    return _error_text(key, error["input"], problem, layers)


def _error_text(key: str, value: object, problem: str, layers: list[_Layer]) -> str:
    default = get(defaults(), key)
    remedy = "" if default in (None, []) or isinstance(default, dict) else f"; the default is {default}"
    return f"the setting {key} = {value!r} from {_origin(key, layers)} is wrong: {problem}{remedy}"


def _unknown_text(key: str, source: str) -> str:
    names, last = sorted({*setting_names(), *sections()}), key.rpartition(".")[2]
    near = [name for name in names if name.rpartition(".")[2] == last] or difflib.get_close_matches(key, names, n=1)
    remedy = f"did you mean {' or '.join(near)}?" if near else "`python -m swarm.config` lists all settings"
    return f"there is no setting {key} (from {source}); {remedy}"


def _origin(key: str, layers: list[_Layer]) -> str:
    """Return the origin of the effective value; for a part of a value (``plan.exclude.0``), the origin of the whole
    value."""
    key = next((name for name in setting_names() if key.startswith(f"{name}.")), key)
    for layer in reversed(layers):
        if get(layer.values, key) is not None:
            return _variable(key) if layer.source == _ENVIRONMENT else layer.source
    return DEFAULTS


def _variable(key: str) -> str:
    """Return the environment variable that sets this key."""
    variable = f"SWARM_{key.upper().replace('.', '__')}"
    if variable not in map(str.upper, os.environ):  # a whole section in one variable, or the alias for the URL
        variable = "SWARM_URL" if key == "client.url" else variable.partition("__")[0]
    return f"the environment variable {variable}"
