"""Conversion of the user's name of a model into what workers load."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.cli.up.summary import GENERATE
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from swarm.config import Settings
    from swarm.stage.quantization.at_load import Quantization

EMBED = 'swarm embed "Once upon a time"'


def resolve_model(settings: Settings) -> str:
    """Return what workers load: a model's directory, a hub name with its current commit, or the demo model.

    For a model on a hub, the small files are fetched here, once; each worker fetches the weights of its own layers.
    Raises ``ModelError``, so that problems are found before workers start.
    """
    return resolve_models(settings)[0].location


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model to run. ``location``: what workers load; ``folder``: of its configuration; ``num_bytes``: bytes of its
    weights in the files; ``limits``: what of it is not served; ``example``: a command that uses it, if there is one."""

    name: str
    location: str
    folder: Path
    num_bytes: int
    limits: str = ""
    example: str = GENERATE


def resolve_models(settings: Settings, models: Sequence[str] = ()) -> list[ResolvedModel]:
    """Return these models, or the one of the settings, each as ``resolve_model`` does. Raises ``ConfigError`` if two
    have the same name."""
    if not models and settings.model is None:
        from swarm.demo import model_path

        return [ResolvedModel(model_path().name, str(model_path()), model_path(), 0)]
    from swarm.stage.quantization.at_load import Quantization

    how = Quantization.from_settings(settings.worker)
    resolved = [_resolve(model, how) for model in models or [settings.model or ""]]
    names = [model.name for model in resolved]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"two models are called {min(twice)!r}, and requests select a model by its name")
    return resolved


def resolve_draft(settings: Settings) -> str | None:
    """Return what the draft model's process loads, as ``resolve_model`` does; None without a draft model."""
    if settings.broker.draft is None:
        return None
    from swarm.stage.quantization.at_load import AS_STORED

    return _resolve(settings.broker.draft, AS_STORED).location


def with_adapters(settings: Settings, model: str) -> Settings:
    """Return the settings with the commit of each adapter on a hub, so that all workers load the same files.

    Raises ``ModelError`` for one that can't be served by its configuration or the values of its weights, or that is
    called as the model is, once instead of in each worker.
    """
    from swarm.stage.model.adapter_files import check_names, check_values, locate_adapter, read_adapter_config

    sources = dict(adapter.split("=", 1) for adapter in settings.worker.adapters)
    check_names(sources, model)
    resolved = []
    for name, given in sources.items():
        folder, source = locate_adapter(given)
        read_adapter_config(folder)
        check_values(folder)
        resolved.append(f"{name}={source}")
    worker = settings.worker.model_copy(update={"adapters": tuple(resolved)})
    return settings.model_copy(update={"worker": worker})


def _resolve(model: str, quantization: Quantization) -> ResolvedModel:
    from swarm.cli.output import ConsoleProgress
    from swarm.stage.model.checkpoint import Checkpoint
    from swarm.stage.model.location import locate_model
    from swarm.stage.model.text_tower import TEXT_ONLY_NOTE

    progress = ConsoleProgress(sys.stdout)
    try:
        location = locate_model(model, progress.set_status)
    finally:
        progress.clear_status()
    # raises ModelError, once instead of in each worker
    checkpoint = Checkpoint.at(location, quantization)
    checkpoint.check_sizes()
    checkpoint.check_layers()
    limits = TEXT_ONLY_NOTE if checkpoint.is_text_only else ""
    example = {"vocabulary": GENERATE, "none": EMBED, "scores": ""}[checkpoint.head]
    return ResolvedModel(checkpoint.name, location.name, location.folder, checkpoint.num_bytes, limits, example)
