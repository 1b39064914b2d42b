"""Adapters by name: the two files of a peft adapter, in the hub's cache. See ``lookup`` about the environment."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub import try_to_load_from_cache as find_in_cache

from swarm.errors import ModelError
from swarm.hub.download import Download
from swarm.hub.errors import INTERRUPTED, HubErrors
from swarm.hub.http import silence_package
from swarm.hub.listing import list_files
from swarm.hub.names import HubName

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def look_up_adapter(name: HubName) -> Path:
    """Return the folder of an adapter in the cache, which has priority: with both files, no request is made. Raises
    ModelError."""
    errors = HubErrors(name.repository, name.revision)
    try:
        paths = [find_in_cache(name.repository, file, revision=name.revision) for file in (CONFIG, WEIGHTS)]
    except ValueError as error:
        raise errors.invalid_name(error) from None
    if isinstance(paths[0], str) and isinstance(paths[1], str):
        return Path(paths[0]).parent
    files = list_files(name.repository, name.revision).files
    for file in (CONFIG, WEIGHTS):
        if file not in files:
            raise ModelError(f"{errors.name} has no {file} at the hub; is it an adapter in peft's format?")
    with errors.converted(INTERRUPTED), silence_package():
        folder = Path(snapshot_download(name.repository, revision=name.revision, allow_patterns=[CONFIG]))
    sizes = {WEIGHTS: files[WEIGHTS].size or 0}
    Download(name.repository, folder, sizes, lambda *_: None, lambda _: None).run([WEIGHTS])
    return folder
