"""Test doubles that ship with the package: a manual clock, and an executor whose arithmetic is a hash chain.

The fake model is stricter than a real one: a layer's state at a position is a hash of the state at the previous
position and of the input, so that a lost, duplicated, reordered or foreign position changes every later token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from swarm.errors import IllegalMove, KvFull, ModelError
from swarm.params import SamplingParams
from swarm.stage.executor import (
    Batch,
    Capacity,
    FenceRaised,
    ForwardResult,
    KvData,
    Progress,
    PromptJob,
    SampleJob,
    StopCheck,
    is_end_token,
)
from swarm.testing_images import FAKE_VISION, NO_SIGHT, FakeImages, Sight, fake_sight, see
from swarm.wire.messages import (
    BLOCK,
    MAX_SEQUENCES,
    AdapterEntry,
    LayerCost,
    LayerRange,
    Manifest,
    PromptLogprobs,
    Row,
    Sampled,
    SequencePosition,
    SequenceVector,
    TokenLogprob,
    layers_of,
    num_blocks,
    to_ranges,
)
from swarm.wire.prompt_logprobs import pack_logprobs
from swarm.wire.shared_positions import SharedPositions
from swarm.wire.state_positions import positions_after_part

STATE_BYTES = 8  # memory of a position in a layer
_MASK = 2**64 - 1
_FINITE = 0xBFFFFFFFBFFFFFFF  # Exponents below 128.
_UNFINISHED = 0  # in place of the state of a position that a fence kept from being computed in all layers


class ManualClock:
    """Clock that a test moves."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> float:
        self._now += seconds
        return self._now


def fake_manifest(
    num_layers: int = 6,
    vocab_size: int = 97,
    context: int = 512,
    name: str = "chain",
    state_stride: int = 0,
    *,
    sees: bool = False,
) -> Manifest:
    """Return the manifest of a hash chain model. Token 0 ends a sequence. With a ``state_stride`` it is recurrent.
    ``sees``: it reads images."""
    return Manifest(
        name=name,
        architecture="HashChain",
        num_layers=num_layers,
        hidden_size=2,
        vocab_size=vocab_size,
        context=context,
        eos_token_ids=(0,),
        dtype="float32",
        layer_bytes=(1 << 20,) * num_layers,
        embed_bytes=1 << 20,
        head_bytes=1 << 20,
        kv_bytes_per_token=(1,) * num_layers,
        state_bytes=(state_stride,) * num_layers if state_stride else (),
        state_stride=state_stride,
        vision=FAKE_VISION if sees else None,
        files=(),
        assets=(),
    )


def mix(a: int, b: int) -> int:
    """Hash two numbers to 64 bits. Fast, and good enough to distinguish any two histories."""
    x = ((a ^ (a >> 29)) * 0x9E3779B97F4A7C15 + b * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) & _MASK
    x = ((x ^ (x >> 32)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def fake_layer(layer: int, before: int, hidden: int) -> tuple[int, int]:
    """Compute (new state, output) from the state at the previous position and the input. Outputs are the bits of two
    finite float32, like a real model's."""
    # mix(before + layer, hidden), then mix(state, hidden): inlined, because this is the most called function.
    state = before + layer
    state = ((state ^ (state >> 29)) * 0x9E3779B97F4A7C15 + hidden * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) & _MASK
    state = ((state ^ (state >> 32)) * 0x94D049BB133111EB) & _MASK
    state ^= state >> 31
    output = ((state ^ (state >> 29)) * 0x9E3779B97F4A7C15 + hidden * 0xD1B54A32D192ED03) & _MASK
    return state, (output ^ (output >> 32)) & _FINITE


def fake_salt(adapter: str) -> int:
    """Return what an adapter changes in each layer, by the content in its key; 0 without one. It is added to the
    layer's number."""
    return crc32(adapter.partition("@")[2].encode()) << 16 if adapter else 0


def fake_token(hidden: int, params: SamplingParams, seed: int, history: Sequence[int], vocab_size: int) -> int:
    """Draw a token from everything that a real draw may depend on, including the history."""
    chance = 0 if params.greedy else mix(seed, len(history))
    return mix(mix(hidden, hash(tuple(history)) & _MASK), chance) % vocab_size


def fake_logprobs(hidden: int, token: int, params: SamplingParams) -> tuple[TokenLogprob, ...]:
    """Return logprobs of the drawn token; they differ between positions, like the token."""
    if params.logprobs is None:
        return ()
    return (TokenLogprob(token, -(mix(hidden, token) % 100_000) / 1000),)


def fake_prompt_row(hidden: int, token: int, alternatives: int) -> list[TokenLogprob]:
    """Return what is reported of a prompt's token that follows an output: its own entry, then the alternatives."""
    tokens = (token, *(mix(hidden, number) % 97 for number in range(alternatives)))
    return [TokenLogprob(each, -(mix(hidden, each) % 100_000) / 1000) for each in tokens]


def fake_prompt_logprobs(prompt: Sequence[int], params: SamplingParams, num_layers: int) -> bytes:
    """Return the log probabilities of an undisturbed run: the test oracle."""
    outputs, alternatives = _run_prompt([0] * num_layers, prompt[:-1], params), params.prompt_logprobs or 0
    return pack_logprobs([fake_prompt_row(*pair, alternatives) for pair in zip(outputs, prompt[1:], strict=True)])


def fake_continuation(prompt: Sequence[int], params: SamplingParams, seed: int, manifest: Manifest) -> list[int]:
    """Return the tokens of an undisturbed run: the test oracle."""
    return [token for token, _ in fake_draws(prompt, params, seed, manifest)]


def fake_draws(
    prompt: Sequence[int], params: SamplingParams, seed: int, manifest: Manifest
) -> list[tuple[int, tuple[TokenLogprob, ...]]]:
    """Return the tokens of an undisturbed run, each with its logprobs. ``params`` have the adapter's key."""
    states, salt = [0] * manifest.num_layers, fake_salt(params.adapter)
    tokens, draws = list(prompt), []
    hidden, sight = _run_prompt(states, prompt, params)[-1], fake_sight(params.images, len(prompt))
    while True:
        token = fake_token(hidden, params, seed, tokens, manifest.vocab_size)
        tokens.append(token)
        draws.append((token, fake_logprobs(hidden, token, params)))
        is_end = (token in manifest.eos_token_ids and not params.ignore_eos) or token in params.stop_token_ids
        if is_end or len(tokens) - len(prompt) >= params.max_tokens or len(tokens) >= manifest.context:
            return draws
        hidden = _run_layers(states, token, salt, sight)


def fake_vector(prompt: Sequence[int], params: SamplingParams, num_layers: int) -> bytes:
    """Return the vector of an undisturbed run: the test oracle."""
    outputs = _run_prompt([0] * num_layers, prompt, params)
    return fake_vector_bytes(reduce(mix, outputs, 0) if params.vector == "mean" else outputs[-1])


def fake_vector_bytes(number: int) -> bytes:
    """Return a vector of two finite float32 from the bits of a number."""
    return (number & _FINITE).to_bytes(8, "little")


def _run_prompt(states: list[int], prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Return the outputs at all positions of a prompt."""
    salt, images = fake_salt(params.adapter), params.images
    sights = [fake_sight(images, position) if images else NO_SIGHT for position in range(len(prompt))]
    return [_run_layers(states, token, salt, sight) for token, sight in zip(prompt, sights, strict=True)]


def _run_layers(states: list[int], token: int, salt: int, sight: Sight) -> int:
    hidden = token + 1
    for layer, before in enumerate(states):
        hidden = see(layer, hidden, sight) if sight is not NO_SIGHT else hidden
        states[layer], hidden = fake_layer(layer + salt, before, hidden)
    return hidden


@dataclass(slots=True)
class FakeExecutor:
    """An :class:`~swarm.stage.executor.Executor` without matrices. ``fail_load``: reason for which it refuses layers;
    ``fail_adapters``: the same for adapters; ``broken``: the error that its device test raises."""

    manifest: Manifest
    capacity: int = 1 << 14
    fail_load: str = ""
    fail_adapters: str = ""
    broken: str = ""
    layers: LayerRange | None = None
    prepared: LayerRange | None = None
    kept: frozenset[int] = frozenset()
    chains: dict[int, dict[int, list[int]]] = field(default_factory=dict)  # Sequence -> layer -> state per position.
    # (Sequence, layer) -> positions at which it holds the state, if the manifest's layers keep states.
    states: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    limits: dict[int, int] = field(default_factory=dict)
    sums: dict[int, tuple[int, int]] = field(default_factory=dict)  # Sequence -> positions added, and their sum.
    adapters: frozenset[str] = frozenset()  # Keys of those that are loaded.
    adapter_files: dict[str, str] = field(default_factory=dict)  # Source -> content, where its host has another one.
    images: FakeImages = field(default_factory=FakeImages)
    aside: dict[int, list[int]] = field(default_factory=dict)  # Layer -> state per position, of rechecks.
    defer_every: int = 0  # Every n-th requested draw is deferred; 0: none.
    num_draws: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    bits: str = "bits of a fake"
    share_unit: int = 0  # Positions of a chunk that it can share; 0: none.
    # Its system maps no pages any more; it offers no sharing for the next plan, unless it is stubborn.
    refuses_to_share: bool = False
    is_stubborn: bool = False
    shared: SharedPositions = field(default_factory=SharedPositions)

    def measure(self) -> tuple[LayerCost, ...]:
        return (LayerCost("decode", 1, 0, 0.001, False),)

    def prepare(
        self, layers: LayerRange, standby: tuple[LayerRange, ...], max_sequences: int, progress: Progress
    ) -> Capacity:
        if self.fail_load:
            raise ModelError(self.fail_load)
        progress(1, 1)
        self.prepared = layers
        share_unit = 0 if self.refuses_to_share and not self.is_stubborn else self.share_unit
        share_unit = 0 if self.manifest.state_stride else share_unit
        return Capacity(
            self.capacity,
            max_sequences,
            0.0,
            0.0,
            0,
            bits=self.bits,
            share_unit=share_unit,
            share_mappings=MAX_SEQUENCES if share_unit else 0,
        )

    def keep(self, ranges: tuple[LayerRange, ...], progress: Progress, stopped: StopCheck) -> tuple[LayerRange, ...]:
        self.kept &= layers_of(ranges)
        for layer in sorted(layers_of(ranges)):
            if stopped(to_ranges(self.kept)):
                break
            self.kept |= {layer}
        progress(1, 1)
        return to_ranges(self.kept)

    def load_adapters(self, entries: tuple[AdapterEntry, ...]) -> tuple[AdapterEntry, ...]:
        """Load adapters. The content of one follows from its source, unless this host has other files."""
        if self.fail_adapters:
            raise ModelError(self.fail_adapters)
        found = tuple(self._read_adapter(entry) for entry in entries)
        self.adapters |= {entry.key for entry in found}
        return found

    def _read_adapter(self, entry: AdapterEntry) -> AdapterEntry:
        content = self.adapter_files.get(entry.source, entry.source)
        digest = f"{crc32(content.encode()):0>8x}" * 4
        if entry.digest not in ("", digest):
            raise ModelError(f"{entry.source} has other files here than the adapter {entry.name} of the swarm")
        return AdapterEntry(entry.name, entry.source, digest, 1, (1,) * self.manifest.num_layers)

    def drop_adapters(self, keys: tuple[str, ...]) -> None:
        self.adapters -= set(keys)

    def _salt(self, batch: Batch, row: int) -> int:
        """Return what the adapter of a row changes in each layer."""
        adapter = batch.adapters[row] if batch.adapters else ""
        if adapter and adapter not in self.adapters:
            raise IllegalMove(f"a row has the adapter {adapter}, loaded are {sorted(self.adapters)}")
        return fake_salt(adapter)

    def loaded_bits(self) -> str:
        return self.bits

    def activate(self, layers: LayerRange, kept: tuple[LayerRange, ...] = (), share_unit: int = 0) -> None:
        if layers != self.prepared:
            raise IllegalMove(f"activate {layers}, but {self.prepared} is prepared")
        loaded = self.kept | self._own_layers()
        wanted = layers_of(kept)
        if not wanted <= loaded:
            raise IllegalMove(f"{kept} are to be kept, but only {to_ranges(loaded)} are loaded")
        copied = wanted - self._own_layers()  # of its own former layers it keeps nothing
        self.layers, self.kept = layers, wanted
        self.shared.clear(share_unit)
        self.images.start_epoch(has_tower=self.manifest.vision is not None and layers.first == 0)
        for chains in self.chains.values():
            for layer in chains.keys() - self._own_layers() - copied:
                del chains[layer]
        self.states = {
            (sequence, layer): held
            for (sequence, layer), held in self.states.items()
            if layer in self.chains.get(sequence, {})
        }

    def _own_layers(self) -> frozenset[int]:
        return layers_of(() if self.layers is None else (self.layers,))

    def open(self, sequence: int, limit: int) -> None:
        self.release(sequence)
        self.chains[sequence] = {}
        self.limits[sequence] = limit

    def fork(self, sequence: int, source: int, position: int, limit: int, *, may_share: bool = True) -> None:
        own = self.chains[source].items()
        self.shared.release(sequence)
        if may_share and self.refuses_to_share and self.shared.fork_stop(source, position):
            self.release(sequence)
            raise KvFull(f"sequence {sequence} can't share positions of {source}, as the plan counts")
        if may_share:
            self.shared.fork(sequence, source, position)
        self.chains[sequence] = {layer: chain[:position] for layer, chain in own if layer in self._own_layers()}
        self.limits[sequence] = limit
        for layer in self.chains[sequence] if self.manifest.state_stride else ():
            self._read_state(source, layer, position)
            self.states[sequence, layer] = {held for held in self.states[source, layer] if held <= position}

    def share(self, sequence: int, source: int, position: int, *, is_mapped: bool) -> None:
        if self.refuses_to_share:
            raise KvFull(f"sequence {sequence} can't share positions of {source}, as the plan counts")
        if not self.shared.inherited(sequence):
            self.shared.fork(sequence, source, position)
        for layer in sorted(self._own_layers()) if is_mapped else ():
            mine, other = self.chains[sequence].setdefault(layer, []), self.chains[source][layer][:position]
            if len(other) < position or mine[:position] != other[: len(mine)]:
                raise IllegalMove(f"sequence {sequence} layer {layer}: its positions are not those of {source}")
            mine[:position] = other

    def shrink(self, sequence: int, limit: int) -> None:
        self.truncate(sequence, limit)
        self.limits[sequence] = limit
        for layer in self.chains[sequence] if (stride := self.manifest.state_stride) else ():
            held = self.states.get((sequence, layer), ())
            self.states[sequence, layer] = {p for p in held if p % stride == 0 or p == limit}

    def forward(self, batch: Batch, fenced: Callable[[], bool], progressed: Callable[[], None]) -> ForwardResult:
        if self.layers is None:
            raise IllegalMove("forward before activate")
        if fenced():
            self._compute_partly(batch)
            raise FenceRaised
        if batch.image_parts and self.manifest.vision is not None and self.layers.first == 0:
            self.images.advance(self.manifest.vision, batch.image_parts, batch.pixels)
        result = self._forward_rows(batch, self.layers) if batch.rows else ForwardResult(None, (), (), 0.0, 0.0)
        progressed()
        return result

    def _forward_rows(self, batch: Batch, own: LayerRange) -> ForwardResult:
        hidden = self._inputs(batch)
        taken = 0
        stops: list[int] = []
        for number, row in enumerate(batch.rows):
            salt = self._salt(batch, number)
            sights = self.images.sights(self.manifest.vision, batch, number, batch.through or own)
            inputs = hidden[taken : taken + row.count]
            if batch.through is None:
                outputs = self._compute_row(row, inputs, salt, sights)
            else:
                outputs = self._replay_row(row, inputs, batch.through, salt, sights)
            hidden[taken : taken + row.count] = outputs
            taken += row.count
            stops.append(taken)
        if own.stop < self.manifest.num_layers:
            onward = np.array(hidden, dtype=np.uint64).view(np.float32).reshape(-1, 2)
            return ForwardResult(onward, (), (), 0.001, 0.0)
        late = tuple(batch.rows[job.row].sequence for job in batch.samples if self._is_deferred())
        sampled: list[Sampled] = []
        certain: list[SequencePosition] = []
        for job in batch.samples:
            row, stop = batch.rows[job.row], stops[job.row]
            if row.sequence not in late:
                drawn = self._verify(job, row, hidden[stop - 1 - job.num_proposed : stop])
                sampled += drawn
                certain.append(SequencePosition(row.sequence, drawn[-1].position))
        vectors: list[SequenceVector] = []
        for vector_job in batch.vectors:
            row, stop = batch.rows[vector_job.row], stops[vector_job.row]
            last = self._add(row, hidden[stop - row.count : stop]) if vector_job.kind == "mean" else hidden[stop - 1]
            if vector_job.is_end:
                vectors.append(SequenceVector(row.sequence, row.start + row.count, fake_vector_bytes(last)))
        return ForwardResult(
            None,
            tuple(sampled),
            (),
            0.001,
            0.0,
            late=late,
            certain=tuple(certain),
            vectors=tuple(vectors),
            prompt_logprobs=tuple(self._score(job, batch.rows[job.row], hidden, stops) for job in batch.prompts),
        )

    @staticmethod
    def _score(job: PromptJob, row: Row, hidden: list[int], stops: list[int]) -> PromptLogprobs:
        outputs = hidden[stops[job.row] - row.count :]
        rows = [fake_prompt_row(*pair, job.alternatives) for pair in zip(outputs, job.following, strict=False)]
        return PromptLogprobs(row.sequence, row.start + 1, pack_logprobs(rows))

    def _add(self, row: Row, outputs: list[int]) -> int:
        """Add a row to its sequence's sum, which begins with position 0."""
        position, total = self.sums.get(row.sequence, (0, 0)) if row.start else (0, 0)
        if position != row.start:
            raise IllegalMove(f"sequence {row.sequence} goes on at {row.start}, its sum has {position} positions")
        for output in outputs:
            total = mix(total, output)
        self.sums[row.sequence] = (row.start + row.count, total)
        return total

    def recheck(
        self, batch: Batch, limit: int, fenced: Callable[[], bool], progressed: Callable[[], None]
    ) -> ForwardResult:
        layers, (row,) = batch.through, batch.rows
        assert layers is not None
        if not layers_of((layers,)) <= self.kept | self._own_layers():
            raise IllegalMove(f"layers {layers} are not loaded here")
        if fenced():
            raise FenceRaised
        if row.start == 0:
            self.aside = {layer: [] for layer in range(layers.first, layers.stop)}
        hidden, salt = self._inputs(batch), self._salt(batch, 0)
        for offset in range(row.count):
            for layer, chain in self.aside.items():
                assert len(chain) == row.start + offset
                state, hidden[offset] = fake_layer(layer + salt, chain[-1] if chain else 0, hidden[offset])
                chain.append(state)
        progressed()
        if layers.stop < self.manifest.num_layers:
            return ForwardResult(np.array(hidden, dtype=np.uint64).view(np.float32).reshape(-1, 2), (), (), 0.001, 0.0)
        return ForwardResult(None, tuple(self._draw(job, row, hidden[-1]) for job in batch.samples), (), 0.001, 0.0)

    def _inputs(self, batch: Batch) -> list[int]:
        if batch.hidden is None:
            return [int(token) + 1 for token in batch.tokens]
        raw: NDArray[np.uint64] = np.ascontiguousarray(batch.hidden).view(np.uint64).reshape(-1)
        return [int(value) for value in raw]

    def _compute_row(self, row: Row, hidden: list[int], salt: int, sights: list[Sight]) -> list[int]:
        """Compute a row through all layers of this stage, in order.

        Positions after the row's start are discarded first: they were truncated, or belong to a step that a fence
        aborted.
        """
        assert self.layers is not None
        chains, start, stop = self.chains[row.sequence], row.start, row.start + row.count
        if stop > self.limits[row.sequence]:
            raise IllegalMove(f"sequence {row.sequence} outgrows its limit {self.limits[row.sequence]}")
        for layer in range(self.layers.first, self.layers.stop):
            chain = chains.setdefault(layer, [])
            if len(chain) < start:
                raise IllegalMove(f"sequence {row.sequence} layer {layer}: position {start}, held {len(chain)}")
            self._move_state(row, layer)
            state = chain[start - 1] if start else 0
            self._stop_sharing(row.sequence, start)
            del chain[start:]
            if sights:
                hidden[:] = (see(layer, *pair) for pair in zip(hidden, sights, strict=True))
            for offset, value in enumerate(hidden):
                state, hidden[offset] = fake_layer(layer + salt, state, value)
                chain.append(state)
        if stop // BLOCK != start // BLOCK or start % BLOCK == 0:
            self._check_capacity()
        return hidden

    def _compute_partly(self, batch: Batch) -> None:
        """Let a fence stop a recurrent model in mid-step: the first layers have gone on, the last ones have not."""
        layers = batch.through or self.layers
        assert layers is not None
        done = range(layers.first, layers.first + len(layers) // 2) if self.manifest.state_stride else ()
        for row in batch.rows:
            for layer in done:
                chain = self.chains[row.sequence].setdefault(layer, [])
                self._move_state(row, layer)
                chain[row.start :] = [_UNFINISHED] * row.count  # nobody must read it

    def _move_state(self, row: Row, layer: int) -> None:
        """Replace the state before a row by the ones that it leaves."""
        stride = self.manifest.state_stride
        if not stride:
            return
        self._read_state(row.sequence, layer, row.start)
        stop = row.start + row.count
        last = stop // BLOCK * BLOCK
        held = {0, row.start, stop - 1, stop, *range(row.start // stride * stride + stride, stop, stride)}
        held |= {last} if last > row.start else set()
        self.states[row.sequence, layer] = held | {
            position
            for position in self.states.get((row.sequence, layer), ())
            if position <= row.start and (position % stride == 0 or position == last)
        }

    def _read_state(self, sequence: int, layer: int, position: int) -> None:
        if position and position not in self.states.get((sequence, layer), ()):
            raise IllegalMove(f"sequence {sequence} layer {layer}: no state is held at {position}")

    def _check_capacity(self) -> None:
        if self.kv_used() > self.capacity:
            raise IllegalMove(f"{self.kv_used()} positions are held, the capacity is {self.capacity}")

    def _replay_row(self, row: Row, hidden: list[int], layers: LayerRange, salt: int, sights: list[Sight]) -> list[int]:
        """Compute a row through some layers, position by position."""
        for layer in range(layers.first, layers.stop):
            self._move_state(row, layer)
        for offset, value in enumerate(hidden):
            change = salt, sights[offset] if sights else NO_SIGHT
            hidden[offset] = self._compute_position(row.sequence, row.start + offset, value, layers, change)
        self._discard_from(row.sequence, row.start + row.count, layers)
        return hidden

    def _compute_position(
        self, sequence: int, position: int, hidden: int, layers: LayerRange, change: tuple[int, Sight]
    ) -> int:
        """Compute one position. States that are held already, and not left by a fence, must be equal. ``change``: by
        the sequence's adapter, and by its images."""
        chains, (salt, sight) = self.chains[sequence], change
        if position >= self.limits[sequence]:
            raise IllegalMove(f"sequence {sequence} outgrows its limit {self.limits[sequence]}")
        for layer in range(layers.first, layers.stop):
            chain = chains.setdefault(layer, [])
            if len(chain) < position:
                raise IllegalMove(f"sequence {sequence} layer {layer}: position {position}, held {len(chain)}")
            hidden = see(layer, hidden, sight) if sight is not NO_SIGHT else hidden
            state, hidden = fake_layer(layer + salt, chain[position - 1] if position else 0, hidden)
            if position < len(chain) and chain[position] != _UNFINISHED:
                if chain[position] != state:
                    raise IllegalMove(f"sequence {sequence} layer {layer}: a replay differs at position {position}")
                continue
            chain[position:] = [state]
        if position % BLOCK == 0:
            self._check_capacity()
        return hidden

    def _discard_from(self, sequence: int, stop: int, layers: LayerRange) -> None:
        """Discard the positions from ``stop`` on, as writing a block of a real cache does. Shared ones are computed
        again by the next chunks."""
        for layer in range(layers.first, layers.stop):
            del self.chains[sequence][layer][stop:]

    def _stop_sharing(self, sequence: int, position: int) -> None:
        """Count a sequence's positions as its own if positions that it shares are written or dropped."""
        if position < self.shared.stop(sequence):
            self.shared.release(sequence)

    def _is_deferred(self) -> bool:
        self.num_draws += 1
        return self.defer_every > 0 and self.num_draws % self.defer_every == 0

    def _verify(self, job: SampleJob, row: Row, hidden: list[int]) -> list[Sampled]:
        """Draw a token after the last certain one, and after each proposal that equals the token before it."""
        drawn: list[Sampled] = []
        proposals = [*job.history[job.num_certain :], None]
        for position, (value, proposal) in enumerate(zip(hidden, proposals, strict=True), job.num_certain):
            drawn.append(self._draw(job, row, value, position))
            token = drawn[-1].token
            if token != proposal or is_end_token(token, job.params, self.manifest.eos_token_ids):
                break
        return drawn

    def _draw(self, job: SampleJob, row: Row, hidden: int, position: int | None = None) -> Sampled:
        """Draw the token at a position, which by default is the one behind the row."""
        position = row.start + row.count if position is None else position
        token = fake_token(hidden, job.params, job.seed, job.history[:position], self.manifest.vocab_size)
        return Sampled(row.sequence, position, token, fake_logprobs(hidden, token, job.params))

    def drop_spare(self) -> None:
        self.kept, self.aside = frozenset(), {}
        self.images.clear()

    def test(self, progressed: Callable[[], None]) -> None:
        if self.broken:
            raise RuntimeError(self.broken)
        progressed()

    def truncate(self, sequence: int, position: int) -> None:
        self._stop_sharing(sequence, position)
        for layer, chain in self.chains[sequence].items():
            del chain[position:]
            if self.manifest.state_stride:
                held = self.states[sequence, layer] = {
                    p for p in self.states.get((sequence, layer), ()) if p <= position
                }
                del chain[max(held, default=0) :]

    def release(self, sequence: int) -> None:
        self.shared.release(sequence)
        self.chains.pop(sequence, None)
        self.sums.pop(sequence, None)
        self.limits.pop(sequence, None)
        self.states = {key: held for key, held in self.states.items() if key[0] != sequence} if self.states else {}

    def reset(self) -> None:
        self.chains.clear()
        self.states.clear()
        self.sums.clear()
        self.limits.clear()
        self.shared.clear(self.shared.unit)

    def read_kv(self, sequence: int, layers: LayerRange, start: int, stop: int) -> KvData:
        """Return the differences between neighbouring states, so that a foreign position spoils all those behind it."""
        chains = [self.chains.get(sequence, {}).get(layer, []) for layer in range(layers.first, layers.stop)]
        if any(len(chain) < stop for chain in chains):
            raise IllegalMove(f"sequence {sequence}: {[*map(len, chains)]} are held in {layers}, {stop} are to be read")
        for layer in range(layers.first, layers.stop) if self.manifest.state_stride else ():
            self._read_state(sequence, layer, stop)
        states = np.array([([0, *chain])[start : stop + 1] for chain in chains], dtype=np.uint64)
        return KvData(layers, start, stop, "float32", (states[:, 1:] ^ states[:, :-1]).view(np.float32))

    @property
    def kv_identity(self) -> str:
        return "fake"

    def fits_kv(self, data: KvData) -> bool:
        is_range = 0 <= data.layers.first < data.layers.stop <= self.manifest.num_layers and data.start < data.stop
        num_bytes = STATE_BYTES * len(data.layers) * (data.stop - data.start) if is_range else 0
        return is_range and data.dtype == self.dtype and data.numbers.nbytes == num_bytes

    def write_kv(self, sequence: int, limit: int, data: KvData) -> None:
        """Store states. As in a real cache, written positions may cost those behind them in the same block."""
        if not self.fits_kv(data):
            raise IllegalMove(f"{data.numbers.nbytes} bytes are no states of {data.layers.label}")
        if sequence not in self.chains:
            self.open(sequence, limit)
        if data.stop > self.limits[sequence]:
            raise IllegalMove(f"sequence {sequence} outgrows its limit {self.limits[sequence]}")
        changes = np.ascontiguousarray(data.numbers).view(np.uint64).reshape(len(data.layers), -1)
        for layer, numbers in zip(range(data.layers.first, data.layers.stop), changes, strict=True):
            chain = self.chains[sequence].setdefault(layer, [])
            if len(chain) < data.start:
                raise IllegalMove(f"sequence {sequence} layer {layer}: {data.start} is written, {len(chain)} are held")
            before = np.uint64(chain[data.start - 1] if data.start else 0)
            chain[data.start : data.stop] = (np.bitwise_xor.accumulate(numbers) ^ before).tolist()
            if len(chain) < num_blocks(data.stop) * BLOCK:
                del chain[data.stop :]
            if stride := self.manifest.state_stride:
                held = self.states.get((sequence, layer), ())
                self.states[sequence, layer] = positions_after_part(held, data.stop, stride)

    def drop_kv(self, sequence: int, layers: LayerRange) -> None:
        for layer in range(layers.first, layers.stop):
            self.chains[sequence].pop(layer, None)
            self.states.pop((sequence, layer), None)

    def enter_thread(self) -> None:
        pass

    def kv_copy_bytes(self) -> int:
        own = self._own_layers()
        copies = (chain for chains in self.chains.values() for layer, chain in chains.items() if layer not in own)
        return STATE_BYTES * sum(map(len, copies))

    def kv_free_bytes(self) -> int:
        num_layers = max(1, len(self._own_layers()))
        return (self.capacity - self.kv_used()) * num_layers * STATE_BYTES - self.kv_copy_bytes()

    def kv_capacity(self) -> int:
        return self.capacity

    def kv_used(self) -> int:
        """Return the written positions of the layers in use, rounded up to blocks. Shared ones count once."""
        own = self._own_layers()
        lengths = (
            max((len(c) for layer, c in held.items() if layer in own), default=0) for held in self.chains.values()
        )
        return sum(num_blocks(length) * BLOCK for length in lengths) - self.shared.saved

    def warm_up(self) -> float:
        return 0.0

    def stats(self) -> dict[str, float]:
        return {"kv_used": float(self.kv_used())}
