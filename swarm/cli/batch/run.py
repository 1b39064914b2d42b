"""From a file of requests to its results. A batch is found again by the digest of its file, which its metadata has: so
the same command continues where an earlier one ended, and stores nothing on this machine."""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from swarm.cli.batch.http import GatewayAway, GatewayClient, Json
from swarm.errors import InvalidRequest

POLL_S = 1.0
DIGEST = "swarm_input"  # key of the metadata
RATE_S = 30.0  # seconds over which the rate of answers is measured
MAX_PAGES = 100  # pages of batches that are searched
FINAL = ("completed", "failed", "expired", "cancelled")
_UNUSABLE = ("failed", "expired", "cancelling", "cancelled")  # batches that a new run does not continue


@dataclass(frozen=True, slots=True)
class BatchInput:
    """A file of requests."""

    file: Path
    endpoint: str
    digest: str

    @classmethod
    def read(cls, file: Path) -> BatchInput:
        """Read the file's digest, and its endpoint from the first request. Raises InvalidRequest."""
        digest, endpoint = hashlib.sha256(), ""
        try:
            with file.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    digest.update(line)
                    if not endpoint and line.strip():
                        endpoint = _url_of(file, number, line)
        except OSError as error:
            raise InvalidRequest(f"{file} can't be read ({error.strerror})") from None
        if not endpoint:
            raise InvalidRequest(f"{file} has no requests")
        return cls(file, endpoint, digest.hexdigest())


def _url_of(file: Path, number: int, line: bytes) -> str:
    try:
        url = json.loads(line)["url"]
    except (ValueError, KeyError, TypeError):
        url = None
    if not isinstance(url, str):
        wanted = '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}'
        raise InvalidRequest(f"line {number} of {file} is no request; a line is {wanted}")
    return url


def find_batch(client: GatewayClient, source: BatchInput) -> Json | None:
    """Return the newest batch of this file that has not failed."""
    after = ""
    for _ in range(MAX_PAGES):
        page = client.get(f"/v1/batches?limit=100{after}")
        for batch in page["data"]:
            if (batch["metadata"] or {}).get(DIGEST) == source.digest and batch["status"] not in _UNUSABLE:
                return dict(batch)
        if not page["has_more"]:
            return None
        after = f"&after={page['last_id']}"
    return None


def create_batch(client: GatewayClient, source: BatchInput, window: str, *, is_new: bool) -> Json:
    """Upload the file and create its batch. If the gateway goes away meanwhile, look whether it has created it.
    ``is_new``: an earlier batch of the same file does not count."""
    earlier = (find_batch(client, source) or {}).get("id") if is_new else None
    file_id = client.upload(source.file)
    body = {
        "input_file_id": file_id,
        "endpoint": source.endpoint,
        "completion_window": window,
        "metadata": {DIGEST: source.digest},
    }
    while True:
        try:
            return client.post("/v1/batches", body)
        except GatewayAway as error:
            client.wait(str(error))
        batch = find_batch(client, source)
        if batch is not None and batch["id"] != earlier:
            return batch


@dataclass(slots=True)
class ProgressLine:
    """One line about a batch in progress. Pure."""

    _seen: deque[tuple[float, int]] = field(default_factory=deque)  # (time, number of answers)

    def text(self, batch: Json, now: float) -> str:
        counts = batch["request_counts"]
        num_done = counts["completed"] + counts["failed"]
        self._seen.append((now, num_done))
        while len(self._seen) > 2 and self._seen[0][0] < now - RATE_S:
            self._seen.popleft()
        text = f"{batch['id']} {batch['status']}: {num_done:,} of {counts['total']:,} answered"
        if counts["failed"]:
            text += f", {counts['failed']:,} failed"
        passed_s, num_new = now - self._seen[0][0], num_done - self._seen[0][1]
        if passed_s > 0 and num_new:
            text += f", {num_new / passed_s:.1f} lines/s"
        return text


def follow(
    client: GatewayClient,
    batch: Json,
    show: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Json:
    """Wait for a batch's end and return it."""
    line = ProgressLine()
    while batch["status"] not in FINAL:
        show(line.text(batch, clock()))
        sleep(POLL_S)
        batch = client.get(f"/v1/batches/{batch['id']}")
    show(line.text(batch, clock()))
    return batch


def write_results(client: GatewayClient, batch: Json, output: Path, errors: Path) -> list[Path]:
    """Write the answers and the errors of an ended batch, and return the files that there are."""
    written = []
    for file_id, target in ((batch["output_file_id"], output), (batch["error_file_id"], errors)):
        if file_id:
            client.download(file_id, target)
            written.append(target)
    return written
