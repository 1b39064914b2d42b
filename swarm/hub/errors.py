"""Errors between this process and a hub, one sentence each: what was tried, why it failed, and what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from huggingface_hub import constants, errors

from swarm.errors import ModelError

UNREACHABLE = (
    "there is no directory or file {name}, the cache {cache} does not hold that model, and the hub at {endpoint} can't "
    "be reached ({reason}); check the network or HF_ENDPOINT, or name a local directory"
)
INTERRUPTED = "the download of {name} broke off ({reason}); run it again, whole files are kept"
DOWNLOAD_FAILED = (
    "the cache {cache} lacks {files} of {name}, and fetching from the hub at {endpoint} failed ({reason}); check the "
    "network or HF_ENDPOINT, or name a local directory; whole files are kept"
)
RANGES_FAILED = (
    "the cache {cache} lacks parts of {files} of {name}, and fetching them from the hub at {endpoint} failed "
    "({reason}); check the network or HF_ENDPOINT, or name a local file; what was fetched is kept"
)


@dataclass(frozen=True, slots=True)
class HubErrors:
    """Converter of the errors that huggingface_hub raises about one model into ModelErrors."""

    repository: str
    revision: str | None

    @property
    def name(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository

    @contextmanager
    def converted(self, otherwise: str, files: str = "") -> Iterator[None]:
        """Convert exceptions raised inside: known kinds get their own text, others the text ``otherwise`` with their
        reason."""
        try:
            yield
        except (OSError, errors.HTTPError, ValueError, RuntimeError) as error:
            known_text = self._known_error(error, files)
            reason = first_line(list(_causes(error))[-1])
            text = otherwise.format(
                name=self.name, reason=reason, cache=constants.HF_HUB_CACHE, endpoint=constants.ENDPOINT, files=files
            )
            raise ModelError(known_text or text) from None

    def invalid_name(self, error: ValueError) -> ModelError:
        return ModelError(f"{self.name} is no name of a model on a hub: {first_line(error)}")

    def no_commit(self, commit: str) -> ModelError:
        return ModelError(
            f"the hub at {constants.ENDPOINT} reports {commit[:80]!r} as the commit of {self.name}, which is none; "
            "correct HF_ENDPOINT"
        )

    def no_space(self, num_bytes: int, free: int) -> ModelError:
        return ModelError(
            f"{self.name} needs {gigabytes(num_bytes)} more in the cache {constants.HF_HUB_CACHE}, but only "
            f"{gigabytes(free)} are free there; make room, or have HF_HUB_CACHE name another disk"
        )

    def wrong_content(self, file: str, sha256: str) -> ModelError:
        return ModelError(
            f"{file} of {self.name} was fetched in parts, and the whole does not have its sha256 {sha256}: the hub at "
            f"{constants.ENDPOINT} or a proxy sent wrong bytes; the file was removed: start again to fetch it anew"
        )

    def missing_shard(self, file: str) -> ModelError:
        return ModelError(
            f"{self.name} is incomplete at the hub at {constants.ENDPOINT}: it lacks {file}, which its index of shards "
            "names"
        )

    def _known_error(self, error: Exception, files: str) -> str | None:
        for cause in _causes(error):
            if isinstance(cause, errors.OfflineModeIsEnabled):
                return self._offline_error(files)
            if isinstance(cause, errors.HfHubHTTPError):
                return self._http_error(cause)
        return self._disk_error(error) if isinstance(error, OSError) else None

    def _offline_error(self, files: str) -> str:
        forbids = "and HF_HUB_OFFLINE forbids to ask the hub; unset it, or name a local directory"
        if files:
            return f"the cache {constants.HF_HUB_CACHE} lacks {files} of {self.name}, {forbids}"
        return (
            f"there is no directory or file {self.name}, the cache {constants.HF_HUB_CACHE} does not hold that model "
            f"complete, {forbids}"
        )

    def _http_error(self, error: errors.HfHubHTTPError) -> str:
        """Return the text for an HTTP error of the hub."""
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
                    f"there is no directory or file {self.name}, and {hub} shows no such model ({status}): check the "
                    "name, or, if it is private, set HF_TOKEN to a token that may read it"
                )
            case errors.RevisionNotFoundError():
                return f"{self.repository} has no revision {self.revision} at {hub}; check the part after the @"
            case errors.EntryNotFoundError():
                return f"{self.name} is incomplete at {hub}: it lacks a file that its index of shards names"
        if status in (401, 403):
            return f"{hub} refuses access to {self.name} ({status}); set HF_TOKEN to a token that may read it"
        return f"{hub} can't provide {self.name} now: it answers {status}; try again later, or name a local directory"

    def _disk_error(self, error: OSError) -> str | None:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return (
                f"the disk is full: the cache {constants.HF_HUB_CACHE} has no room for {self.name}; make room, or have "
                "HF_HUB_CACHE name another disk"
            )
        if error.errno is not None and error.filename:
            return f"the cache {constants.HF_HUB_CACHE} can't be used for {self.name}: {first_line(error)}"
        return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes, back to the first."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
