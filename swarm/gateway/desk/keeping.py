"""Answers that nobody reads at the moment: they go on for as long as their askers said, and then they are cancelled."""

from __future__ import annotations

import asyncio

from swarm.client.client import AsyncClient
from swarm.errors import ClientError
from swarm.log import get_logger

MAX_KEPT = 1024  # answers; further ones are cancelled at once

log = get_logger(__name__)


class Keeping:
    """One for a desk. What a gateway keeps when it ends is no longer watched: it runs to its own end."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._waits: dict[str, asyncio.Task[None]] = {}

    @property
    def num_kept(self) -> int:
        return len(self._waits)

    def keep(self, request_id: str, keep_s: float) -> None:
        """Cancel this request after so many seconds, unless somebody reads it then."""
        self.forget(request_id)
        wait_s = keep_s if len(self._waits) < MAX_KEPT else 0.0
        self._waits[request_id] = asyncio.ensure_future(self._wait(request_id, wait_s))

    def forget(self, request_id: str) -> None:
        """Somebody reads it again here."""
        wait = self._waits.pop(request_id, None)
        if wait is not None:
            wait.cancel()

    async def _wait(self, request_id: str, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        try:
            if not await self._is_read(request_id):
                await self._client.cancel(request_id)
        except ClientError as error:  # it has ended and is forgotten, or the broker is away
            log.info("kept_answer_not_cancelled", request=request_id, reason=str(error))
        finally:
            if self._waits.get(request_id) is asyncio.current_task():
                del self._waits[request_id]

    async def _is_read(self, request_id: str) -> bool:
        """By whatever gateway."""
        requests = (await self._client.query("requests", request_id=request_id)).get("requests")
        found = requests if isinstance(requests, list) else []
        return any(each["attached"] for each in found if isinstance(each, dict) and each["request_id"] == request_id)

    async def aclose(self) -> None:
        waits, self._waits = list(self._waits.values()), {}
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
