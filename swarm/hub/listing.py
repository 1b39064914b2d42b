"""List of a repository's files, as the hub reports it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from huggingface_hub import HfApi, constants
from huggingface_hub.hf_api import RepoSibling

from swarm.errors import ModelError
from swarm.hub.download import TIMEOUT_S
from swarm.hub.errors import UNREACHABLE, HubErrors


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository at one commit."""

    commit: str
    files: dict[str, RepoSibling]


def list_files(repository: str, revision: str | None) -> Listing:
    """Return the files of a revision. Raises ModelError."""
    with HubErrors(repository, revision).converted(UNREACHABLE):
        try:
            info = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError):
            raise ModelError(f"{constants.ENDPOINT} is not a model hub; correct HF_ENDPOINT") from None
    return Listing(info.sha or "", {file.rfilename: file for file in info.siblings or []})
