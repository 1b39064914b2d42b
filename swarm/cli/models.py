"""``swarm pull`` and ``swarm models``: models of the hub's cache, and whether this version serves them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm.cli.meta.packages import require_packages
from swarm.cli.options import JsonOption
from swarm.cli.output import EXIT_FAILED, ConsoleProgress, format_bytes, print_json, print_table
from swarm.errors import InvalidRequest, ModelError

if TYPE_CHECKING:
    from swarm.hub.headers import Progress
    from swarm.stage.model.checkpoint import Checkpoint
    from swarm.stage.model.location import ModelLocation

app = typer.Typer(rich_markup_mode=None)


def pull(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="owner/name[:QUANTIZATION][@revision] on the hub.", show_default=False),
    ],
    as_json: JsonOption = False,
) -> None:
    """Download all weights of a model from the hub into its cache, after a check whether this version serves it.

    Not needed before swarm up, whose workers fetch the weights of their own layers. What was downloaded is kept after
    an interrupt, and the next call goes on from there. HF_ENDPOINT, HF_HUB_CACHE and HF_TOKEN apply.
    """
    require_packages("worker")
    from swarm.hub.names import parse_name
    from swarm.stage.engine.selfcheck import check_served
    from swarm.stage.model.checkpoint import Checkpoint
    from swarm.stage.model.location import locate_model

    if parse_name(model) is None:
        raise InvalidRequest(f"{model!r} is no name of a model on a hub, such as owner/name or owner/name:Q4_K_M")
    progress = ConsoleProgress(sys.stderr)
    try:
        progress.set_status(f"looking up {model}")
        location = locate_model(model, progress.set_status)
        checkpoint = Checkpoint.at(location)
        check_served(location.folder, checkpoint)
        checkpoint.fetch(_all_names(checkpoint), _show_progress(progress), progress.print_line)
    finally:
        progress.clear_status()
    if as_json:
        print_json({"model": model, "bytes": checkpoint.num_bytes, "location": location.name})
    else:
        print(f"{model} is here, {format_bytes(checkpoint.num_bytes)}; swarm up --model {model} serves it")


def _show_progress(progress: ConsoleProgress) -> Progress:
    is_live = sys.stderr.isatty()

    def show(received: int, total: int) -> None:
        percent = 100 * received // total if total else 100
        if is_live or percent % 10 == 0:  # elsewhere, each change is a line
            progress.set_status(f"{percent} % of {format_bytes(total)}" if not is_live else _bar(received, total))

    return show


def _bar(received: int, total: int) -> str:
    filled = 20 * received // total if total else 20
    return f"{'█' * filled}{'░' * (20 - filled)} {format_bytes(received)} of {format_bytes(total)}"


def _all_names(checkpoint: Checkpoint) -> list[str]:
    return [*checkpoint.tensors, *checkpoint.quantized]


# --- models -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on this machine. ``problem``: why it can't be served; empty if it can."""

    name: str
    num_bytes: int = 0  # of its weights
    missing_bytes: int = 0  # of these, not downloaded
    weights: str = ""  # format
    problem: str = ""
    is_text_only: bool = False

    def row(self) -> tuple[str, str, str, str]:
        present = format_bytes(self.num_bytes - self.missing_bytes)
        size = f"{present} of {format_bytes(self.num_bytes)}" if self.missing_bytes else present
        served = f"no: {self.problem}" if self.problem else "yes, text only" if self.is_text_only else "yes"
        return self.name, size, self.weights, served


@app.callback(invoke_without_command=True)
def models(context: typer.Context) -> None:
    """List the models in the hub's cache, or: check MODEL."""
    if context.invoked_subcommand is None:
        list_models()


@app.command("list", short_help="List the models in the hub's cache.", epilog="Example: swarm models list")
def list_models(as_json: JsonOption = False) -> None:
    """List the models in the hub's cache: their weights on this machine, and whether this version serves them."""
    require_packages("worker")
    models = list(_find_stored())
    if as_json:
        print_json([asdict(model) for model in models])
    else:
        print_table(("model", "size", "weights", "served"), [model.row() for model in models], optional=("weights",))


@app.command("check", short_help="Check whether a model can be served.", epilog="Example: swarm models check DIR")
def check(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="DIR, of which config.json suffices; FILE.gguf, or owner/name.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Check by a model's configuration whether this version serves it, and whether the weights fit it, if they are
    there. Exit code 1 if not, with the reason."""
    require_packages("worker")
    problem = ""
    try:
        served_as = _check(model)
    except ModelError as error:
        problem = str(error)
        if not as_json:
            raise
    if as_json:
        print_json({"model": model, "served": not problem, "problem": problem})
    else:
        print(f"{model} can be served ({served_as})")
    if problem:
        raise typer.Exit(EXIT_FAILED)


def _check(model: str) -> str:
    """Return the architecture, and what of it is not served. Raises ModelError."""
    from swarm.stage.model.checkpoint import Checkpoint
    from swarm.stage.model.folder_files import has_weights
    from swarm.stage.model.kinds import check_folder
    from swarm.stage.model.location import locate_model
    from swarm.stage.model.model_settings import ModelSettings
    from swarm.stage.model.text_tower import TEXT_ONLY_NOTE
    from swarm.stage.model.vision import has_images

    folder, checkpoint = Path(model).expanduser(), None
    if (folder / "config.json").is_file():
        check_folder(folder)
        if has_weights(folder):
            checkpoint = Checkpoint(folder)
    else:
        location = locate_model(model)
        folder, checkpoint = location.folder, Checkpoint.at(location)
    settings = ModelSettings(folder) if checkpoint is None else checkpoint
    settings.check_sizes()

    # This imports torch: what can be refused without it is refused by now.
    from swarm.stage.engine.selfcheck import check_served

    check_served(folder, checkpoint)
    is_text_only = settings.is_multimodal and not has_images(settings.config)
    return f"{settings.architecture}; {TEXT_ONLY_NOTE}" if is_text_only else settings.architecture


def _find_stored() -> Iterator[StoredModel]:
    """Yield the demo model and those in the hub's cache, without a request."""
    from huggingface_hub import constants

    from swarm.demo import model_path
    from swarm.hub.gguf_lookup import list_cached
    from swarm.hub.lookup import cached_snapshot
    from swarm.hub.names import HubName
    from swarm.stage.model.location import ModelLocation, locate_gguf

    yield _describe(f"{model_path().name} (embedded)", lambda: ModelLocation(model_path()))
    for path in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
        repository = path.name.removeprefix("models--").replace("--", "/", 1)
        for revision in _revisions(path):
            try:
                snapshot, ggufs = cached_snapshot(repository, revision), list_cached(repository, revision)
            except ModelError as error:
                yield StoredModel(str(HubName(repository, revision)), problem=str(error))
                continue
            if snapshot is not None:
                yield _describe(str(HubName(repository, revision)), partial(ModelLocation, snapshot.folder, snapshot))
            for gguf in ggufs:
                yield _describe(str(HubName(repository, revision, gguf.files[0].path)), partial(locate_gguf, gguf))


def _revisions(path: Path) -> list[str | None]:
    """Return the revisions of a repository in the cache: None, the default one; then its branches and tags, and the
    commits that none of these is."""
    from huggingface_hub import constants

    refs = {str(file.relative_to(path / "refs")): file for file in (path / "refs").rglob("*") if file.is_file()}
    commits = {file.read_text("utf-8", "replace").strip() for file in refs.values()}
    named = sorted(refs.keys() - {constants.DEFAULT_REVISION})
    return [None, *named, *sorted({folder.name for folder in (path / "snapshots").glob("*")} - commits)]


def _describe(name: str, locate: Callable[[], ModelLocation]) -> StoredModel:
    from swarm.stage.model.checkpoint import Checkpoint

    try:
        checkpoint = Checkpoint.at(location := locate())
    except ModelError as error:
        return StoredModel(name, problem=str(error))
    from swarm.stage.model.fitting import build_unloaded

    formats = sorted({weight.format.name for weight in checkpoint.quantized.values()}) or [checkpoint.stored_dtype]
    missing = sum(checkpoint.missing(_all_names(checkpoint)).values())
    problem = ""
    try:
        build_unloaded(location.folder, checkpoint)
    except ModelError as error:
        problem = str(error)
    weights = ", ".join(formats)
    return StoredModel(name, checkpoint.num_bytes, missing, weights, problem, checkpoint.is_text_only)
