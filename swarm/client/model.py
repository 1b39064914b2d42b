"""The broker's model as a client needs it: manifest, tokenizer and chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from swarm.client.broker_connection import BrokerConnection
from swarm.client.events import AskQuestion
from swarm.client.request import Prompt, RequestSpec, check_token_ids
from swarm.client.text import assets
from swarm.client.text.assemble import PieceAssembler
from swarm.client.text.grammar import GrammarChecker
from swarm.client.text.tokenizer import ASSET_FILES, TextModel
from swarm.errors import InvalidRequest, ModelError, PromptTooLong, Unavailable
from swarm.wire.messages import MAX_ASSET_BYTES, Asset, Description, GetAsset, Manifest, Report

ASK_TIMEOUT_S = 30.0  # answers need no computing


@dataclass(frozen=True, slots=True)
class ClientModel:
    """The client's copy of the broker's model description."""

    manifest: Manifest
    text: TextModel | None  # tokenizer and chat template; None if the model has none
    grammars: GrammarChecker

    @classmethod
    def create(cls, manifest: Manifest, text: TextModel | None) -> ClientModel:
        return cls(manifest, text, GrammarChecker(None if text is None else text.tokenizer, manifest.eos_token_ids))

    def check_stops(self, spec: RequestSpec) -> None:
        if spec.params.stop and self.text is None:
            raise InvalidRequest("this model has no tokenizer: pass stop_token_ids instead of stop strings", "stop")

    def to_input(self, prompt: Prompt, truncate: int | None, second: str | None = None) -> tuple[int, ...]:
        """Return the ids of a text to embed, or of a query and a document. Raises InvalidRequest."""
        context = self.manifest.context
        if truncate is not None and not 1 <= truncate <= context:
            raise InvalidRequest(f"truncate must be between 1 and {context}, not {truncate}", code="truncate")
        if not isinstance(prompt, str):
            ids = check_token_ids(prompt)[:truncate]
        elif self.text is None:
            raise InvalidRequest("this model has no tokenizer: pass token ids", code="tokenizer")
        else:
            ids = self.text.encode_input(prompt, second, most=truncate or context, cuts=truncate is not None)
        if len(ids) > context:
            reason = f"the input has {len(ids)} tokens, {self.manifest.name} holds {context}: shorten or truncate it"
            raise PromptTooLong(reason, len(ids))
        return ids

    def make_assembler(self, spec: RequestSpec, choice: int) -> PieceAssembler:
        ends = () if spec.params.ignore_eos else self.manifest.eos_token_ids
        detokenizer = None if self.text is None else self.text.detokenizer(spec.visible)
        return PieceAssembler(spec.params, choice, frozenset((*ends, *spec.params.stop_token_ids)), detokenizer)


class ModelSource:
    """Fetches the model description from the broker and keeps it while that broker is connected."""

    def __init__(
        self, connect: Callable[[], BrokerConnection], describe: Callable[[], Awaitable[Description]], url: str
    ) -> None:
        self._connect = connect
        self._describe = describe
        self._url = url
        self._model: ClientModel | None = None  # the last one fetched
        self._described_at = -1  # number of the connection on which the model was described; -1 before
        self._lock = asyncio.Lock()  # one fetch at a time
        self._cache: Path = assets.cache_directory()

    async def get(self) -> ClientModel:
        """Return the model, fetched once per connection: after a reconnect, another broker with another model may
        answer."""
        connection = self._connect()
        async with self._lock:
            num_connects = connection.num_connects
            if self._model is None or self._described_at != num_connects:
                description = await self._describe()
                if description.manifest is None:
                    raise Unavailable(f"the swarm has no model yet, it waits for {description.waits_for or 'a worker'}")
                if self._model is None or self._model.manifest != description.manifest:
                    self._model = ClientModel.create(description.manifest, await self._load_text(description.manifest))
                self._described_at = max(num_connects, 1)
            return self._model

    async def _load_text(self, manifest: Manifest) -> TextModel | None:
        assets_by_name = {
            Path(asset.name).name: asset for asset in manifest.assets if Path(asset.name).name in ASSET_FILES
        }
        return TextModel.load({name: await self._fetch(asset) for name, asset in assets_by_name.items()})

    async def _fetch(self, asset: Asset) -> bytes:
        content = assets.read_cached(asset, self._cache)
        if content is not None:
            return content
        if asset.num_bytes > MAX_ASSET_BYTES:
            raise ModelError(f"{asset.name} has {asset.num_bytes} bytes; at most {MAX_ASSET_BYTES} are accepted")
        content = await self._download(asset)
        if not assets.is_genuine(content, asset):
            raise ModelError(f"{asset.name} did not come from {self._url} as the broker announced it: digests differ")
        assets.write_cached(asset, content, self._cache)
        return content

    async def _download(self, asset: Asset) -> bytes:
        link, content = self._connect(), bytearray()
        while len(content) < asset.num_bytes:
            question = GetAsset(name=asset.name, offset=len(content))
            answer, part = await link.ask(AskQuestion(link.new_key(), question, ASK_TIMEOUT_S))
            if isinstance(answer, Report):
                raise Unavailable(f"the broker at {self._url} can't give {asset.name}: {answer.body.get('error')}")
            if not part:
                raise ModelError(f"{asset.name} ends at {len(content)} of {asset.num_bytes} bytes at {self._url}")
            content += part
        return bytes(content)
