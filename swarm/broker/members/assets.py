"""Transfer of the model files that clients need (tokenizer, chat template) from workers to the broker.

The broker asks one worker at a time for each missing file. It asks another one if that worker leaves, if no part of the
file arrives for a while, or if the result is not the file that the manifest names. Only parts from the worker that was
asked are accepted, in order, from offset 0 on. Nothing else is stored, so the memory that uploads can take is bounded
by the size of the files that the manifest names.
"""

from __future__ import annotations

import xxhash

from swarm.broker.events import AssetPartArrived
from swarm.broker.state import ModelUpload, State, Worker
from swarm.wire.messages import MAX_ASSET_BYTES, Asset

REASSIGN_S = 10.0  # without a part of the file; a tokenizer of some MB takes less than a second on any network


class Uploads:
    """Uploads of the model's files. Owns ``state.assets`` and ``state.uploads``."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._under_way = state.uploads

    def assign(self, worker: Worker, now: float) -> tuple[str, ...]:
        """Return the files to request from this worker: those that no other worker is being asked for."""
        names: list[str] = []
        for asset in self._missing():
            if asset.name not in self._under_way:
                self._under_way[asset.name] = ModelUpload(asset, worker.incarnation, now)
                names.append(asset.name)
        return tuple(names)

    def reassign(self, now: float) -> list[tuple[Worker, tuple[str, ...]]]:
        """Reassign stalled uploads. Returns each worker to ask instead, with the names of the files."""
        members = self._state.present_workers
        orders: dict[str, list[str]] = {}
        for name, upload in list(self._under_way.items()):
            if members and self._is_overdue(upload, now):
                after = _next_member(members, upload.incarnation)
                self._under_way[name] = ModelUpload(upload.asset, after.incarnation, now)
                orders.setdefault(after.incarnation, []).append(name)
        return [(self._state.workers[incarnation], tuple(names)) for incarnation, names in orders.items()]

    def add_part(self, worker: Worker | None, part: AssetPartArrived, now: float) -> None:
        """Store a part of a file. The last part completes the file, if its digest is the one in the manifest."""
        upload = self._under_way.get(part.name)
        if worker is None or upload is None or upload.incarnation != worker.incarnation:
            self._state.count("unasked_asset_parts")  # From a worker that was not asked, or is no longer asked.
            return
        if part.offset == 0:
            upload.data.clear()
        is_next = part.offset == len(upload.data) and part.offset + len(part.data) <= upload.asset.num_bytes
        if part.total != upload.asset.num_bytes or not is_next:
            self._state.count("wrong_asset_parts")
            upload.data.clear()  # Start over: the worker is asked again once the upload is overdue.
            return
        upload.received_at = now
        upload.data += part.data
        if len(upload.data) == upload.asset.num_bytes:
            self._finish(upload)

    def drop(self, incarnation: str) -> None:
        """Drop the partial uploads of a worker that is gone."""
        for upload in self._under_way.values():
            if upload.incarnation == incarnation:
                upload.data.clear()

    def _finish(self, upload: ModelUpload) -> None:
        data = bytes(upload.data)
        upload.data.clear()
        if xxhash.xxh3_128_hexdigest(data) != upload.asset.digest:
            self._state.count("wrong_assets")
            return
        del self._under_way[upload.asset.name]
        self._state.assets[upload.asset.name] = data

    def _missing(self) -> list[Asset]:
        manifest = self._state.manifest
        assets = manifest.assets if manifest is not None else ()
        return [a for a in assets if a.name not in self._state.assets and a.num_bytes <= MAX_ASSET_BYTES]

    def _is_overdue(self, upload: ModelUpload, now: float) -> bool:
        worker = self._state.workers.get(upload.incarnation)
        return worker is None or worker.is_gone or now - upload.received_at >= REASSIGN_S


def _next_member(members: list[Worker], incarnation: str) -> Worker:
    """Return the member after this one, round-robin."""
    places = [index for index, worker in enumerate(members) if worker.incarnation == incarnation]
    return members[(places[0] + 1) % len(members) if places else 0]
