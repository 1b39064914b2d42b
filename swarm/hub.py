"""Models by name: ``owner/name`` or ``owner/name@revision``, fetched once from a model hub into the ordinary cache.

What the package huggingface_hub knows, holds here too: ``HF_ENDPOINT`` says where the hub is, ``HF_HUB_CACHE`` or
``HF_HOME`` where its cache is, ``HF_TOKEN`` who asks, ``HF_HUB_OFFLINE`` that nobody may be asked. No torch in
here; but the package is slow to load, so import this where a name is to be looked up, not before.

The cache comes first: what it holds complete is used as it is, without a word to the hub, so that workers started later
load what the earlier ones loaded. Otherwise the small files come first, then the weights, one file after the other; a
file is either whole or absent, so whatever breaks off goes on where it was.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, ModelInfo, constants, errors, hf_hub_download, snapshot_download
from huggingface_hub import try_to_load_from_cache as find_in_cache
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

from swarm.errors import ModelError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER = "tokenizer.json"

# All that is ever read beside the weights. Named one by one: repositories hold the same weights in other formats, in
# folders of their own and as pickles, which nobody here shall even have on disk.
SMALL_FILES = (
    CONFIG,
    "generation_config.json",
    INDEX,
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)

TIMEOUT_S = 20.0  # for the hub's first answer; a busy one takes a few seconds, and a person is waiting

Report = Callable[[str], None]


def fetch(
    repository: str, revision: str | None = None, files: Sequence[str] | None = None, report: Report | None = None
) -> Path:
    """The folder that holds the model in the cache, with what was missing fetched from the hub.

    ``files``: which weights are wanted, by file name; None: all. The small files are always there. ``report`` gets a
    line before each file of weights. Raises ModelError: one sentence on what was tried, why it failed, what to do.
    """
    return _Fetch(repository, revision, files, report or (lambda _: None)).folder()


@dataclass(frozen=True, slots=True)
class _Fetch:
    """One look-up. Everything that the package raises ends here, as a ModelError."""

    repository: str
    revision: str | None
    files: Sequence[str] | None
    report: Report

    @property
    def name(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository

    def folder(self) -> Path:
        cached = self._cached()
        if cached is not None and (cached / TOKENIZER).is_file():
            return cached
        try:
            with _quiet():
                return self._download(self._sizes())
        except ModelError:
            if cached is not None:  # weights without a tokenizer: all that there is, as far as we can know
                return cached
            raise

    # --- the cache ---------------------------------------------------------------------------------------------------

    def _cached(self) -> Path | None:
        """The folder in the cache, if all that is wanted is in it."""
        try:
            config = find_in_cache(self.repository, CONFIG, revision=self.revision)
        except ValueError as error:  # the package is stricter about names
            raise ModelError(f"{self.name} is no name of a model on a hub: {_first_line(error)}") from None
        if not isinstance(config, str):
            return None
        folder = Path(config).parent
        wanted = self._weights(folder)
        return folder if wanted and all((folder / name).is_file() for name in wanted) else None

    def _weights(self, folder: Path) -> list[str]:
        """The files of weights that are wanted, where the small files are already there."""
        names = _shards(folder / INDEX) if (folder / INDEX).is_file() else [SINGLE]
        if self.files is None:
            return names
        unknown = set(self.files) - set(names)
        if unknown:
            raise ModelError(f"{self.name} has no file of weights named {min(unknown)}; it has {', '.join(names)}")
        return [name for name in names if name in self.files]

    # --- the hub -----------------------------------------------------------------------------------------------------

    def _download(self, sizes: dict[str, int]) -> Path:
        with self._explained("the download of {name} broke off ({reason}); run it again, whole files are kept"):
            small = [name for name in SMALL_FILES if name in sizes]
            folder = Path(snapshot_download(self.repository, revision=self.revision, allow_patterns=small))
            missing = [name for name in self._weights(folder) if not (folder / name).is_file()]
            self._check_room(folder, sum(sizes.get(name, 0) for name in missing))
            for number, name in enumerate(missing, 1):
                place = f"{number} of {len(missing)}, {_gigabytes(sizes.get(name, 0))}"
                self.report(f"fetching {self.name}: {name} ({place})")
                # By the commit that the small files are of: somebody may push another meanwhile.
                hf_hub_download(self.repository, name, revision=folder.name, etag_timeout=TIMEOUT_S)
        return folder

    def _sizes(self) -> dict[str, int]:
        """Bytes by name of the files in the repository. Refuses one that has nothing for us before a byte is loaded."""
        files = self._describe().siblings or []
        sizes = {file.rfilename: file.size or 0 for file in files}
        if CONFIG not in sizes:
            raise ModelError(f"{self.name} has no {CONFIG}; is it a language model in Hugging Face form?")
        if INDEX not in sizes and SINGLE not in sizes:
            raise ModelError(
                f"{self.name} has no {SINGLE} and no index of shards; weights in other formats can't be used: choose a "
                "repository that has safetensors, or convert it and name the local directory"
            )
        return sizes

    def _describe(self) -> ModelInfo:
        unreachable = (
            "there is no directory {name}, the cache {cache} does not hold that model complete, and the hub at "
            "{endpoint} can't be reached ({reason}); check the network or HF_ENDPOINT, or name a local directory"
        )
        with self._explained(unreachable):
            try:
                return HfApi().model_info(
                    self.repository, revision=self.revision, files_metadata=True, timeout=TIMEOUT_S
                )
            except (KeyError, TypeError, AttributeError, json.JSONDecodeError):
                raise ModelError(f"what answers at {constants.ENDPOINT} is no model hub; correct HF_ENDPOINT") from None

    def _check_room(self, folder: Path, num_bytes: int) -> None:
        free = shutil.disk_usage(folder).free
        if num_bytes > free:
            raise ModelError(
                f"{self.name} needs {_gigabytes(num_bytes)} more in the cache {constants.HF_HUB_CACHE}, but only "
                f"{_gigabytes(free)} are free there; make room, or have HF_HUB_CACHE name another disk"
            )

    # --- what went wrong ---------------------------------------------------------------------------------------------

    @contextmanager
    def _explained(self, otherwise: str) -> Iterator[None]:
        """What the package raises becomes a ModelError: one of the known kinds, or ``otherwise`` with its reason."""
        try:
            yield
        except (OSError, errors.HTTPError, ValueError) as error:
            known = self._known_trouble(error)
            reason = _first_line(list(_causes(error))[-1])
            text = otherwise.format(
                name=self.name, reason=reason, cache=constants.HF_HUB_CACHE, endpoint=constants.ENDPOINT
            )
            raise ModelError(known or text) from None

    def _known_trouble(self, error: Exception) -> str | None:
        for cause in _causes(error):
            if isinstance(cause, errors.OfflineModeIsEnabled):
                return (
                    f"there is no directory {self.name}, the cache {constants.HF_HUB_CACHE} does not hold that model "
                    "complete, and HF_HUB_OFFLINE forbids to ask the hub; unset it, or name a local directory"
                )
            if isinstance(cause, errors.HfHubHTTPError):
                return self._refusal(cause)
        return self._disk_trouble(error) if isinstance(error, OSError) else None

    def _refusal(self, error: errors.HfHubHTTPError) -> str:
        """The hub answered, but not with what was asked for."""
        status = error.response.status_code
        hub = f"the hub at {constants.ENDPOINT}"
        match error:
            case errors.GatedRepoError():
                return (
                    f"{self.name} is gated ({status}): accept its terms on its page at {hub}, and set HF_TOKEN to a "
                    "token of that account"
                )
            case errors.RepositoryNotFoundError():
                return (
                    f"there is no directory {self.name}, and {hub} shows no such model ({status}): check the name, "
                    "or, if it is private, set HF_TOKEN to a token that may read it"
                )
            case errors.RevisionNotFoundError():
                return f"{self.repository} has no revision {self.revision} at {hub}; check the part after the @"
            case errors.EntryNotFoundError():
                return f"{self.name} is incomplete at {hub}: it lacks a file that its index of shards names"
        if status in (401, 403):
            return f"{hub} refuses access to {self.name} ({status}); set HF_TOKEN to a token that may read it"
        return f"{hub} can't provide {self.name} now: it answers {status}; try again later, or name a local directory"

    def _disk_trouble(self, error: OSError) -> str | None:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return (
                f"the disk is full: the cache {constants.HF_HUB_CACHE} has no room for {self.name}; make room, or have "
                "HF_HUB_CACHE name another disk"
            )
        if error.errno is not None and error.filename:
            return f"the cache {constants.HF_HUB_CACHE} can't be used for {self.name}: {_first_line(error)}"
        return None


def _shards(index: Path) -> list[str]:
    """The files that an index of shards names."""
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{index} can't be read as an index of shards; remove it, and it is fetched again") from None
    strange = [name for name in names if not isinstance(name, str) or not name.endswith(".safetensors")]
    strange += [name for name in names if isinstance(name, str) and Path(name).name != name]
    if strange:
        raise ModelError(f"{index} names {strange[0]!r}, which is not a safetensors file beside it")
    return sorted(names)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what led to it, back to the first."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


@contextmanager
def _quiet() -> Iterator[None]:
    """We say ourselves what happens; the package's bars and warnings would come between our lines."""
    logger = logging.getLogger("huggingface_hub")
    level, chosen = logger.level, constants.HF_HUB_DISABLE_PROGRESS_BARS is not None
    logger.setLevel(logging.ERROR)
    if not chosen:
        disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if not chosen:
            enable_progress_bars()
