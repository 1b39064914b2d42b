"""The broker's whole state: requests, sequences, workers, the plan. Plain values with queries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from swarm.broker.state.adapters import AdapterState
from swarm.broker.state.constraints import PlanConstraints
from swarm.broker.state.costs import StepCosts
from swarm.broker.state.ended_requests import EndedRequests, ForgottenRequests, JournalLookups
from swarm.broker.state.evidence import Evidence
from swarm.broker.state.images import ImageState
from swarm.broker.state.kv_copies import KvCopyState
from swarm.broker.state.lifecycle import SequenceState
from swarm.broker.state.migration import MigrationState
from swarm.broker.state.moves import PlanMoves
from swarm.broker.state.newcomers import Newcomers
from swarm.broker.state.plans import PlanState, RestartState
from swarm.broker.state.prefix import PrefixCache, PrefixRules
from swarm.broker.state.queue import AwaitingJournal, RequestTimers, RetryAfter, WaitingQueue
from swarm.broker.state.rebuilding import Rebuilding
from swarm.broker.state.rechecks import RecheckSchedule
from swarm.broker.state.recoveries import RecoveryHistory
from swarm.broker.state.restores import RestoreState
from swarm.broker.state.running import RunningSequences
from swarm.broker.state.sequences import Request, Sequence
from swarm.broker.state.shared_prefixes import PlanPrefixes
from swarm.broker.state.workers import Routes, Worker
from swarm.params import SamplingParams
from swarm.wire.messages import BLOCK, NO_LINEAGE, Asset, HostHello, Json, Lineage, Manifest, SequencePosition
from swarm.wire.shared_positions import SharedPositions


@dataclass(frozen=True, slots=True)
class InFlightProposal:
    """Tokens that a step proposes for a sequence. ``start``: position of the first one. ``blocks``: KV blocks of the
    sequence without them."""

    proposer: str
    tokens: tuple[int, ...]
    start: int
    blocks: int


@dataclass(slots=True)
class InFlightStep:
    """A step in the pipeline."""

    sequences: tuple[tuple[Sequence, int], ...]  # sequence, and position at which its row ends
    sent_at: float
    num_tokens: int = 0
    residencies: dict[int, int] = field(default_factory=dict)  # sequence -> its ``residency`` when the step was sent
    proposals: dict[int, InFlightProposal] = field(default_factory=dict)  # by sequence
    seen: tuple[int, ...] = ()  # sequences to whose images its parts of images belong
    num_patches: int = 0  # of these parts, each layer counted

    def is_current(self, sequence: Sequence) -> bool:
        """Whether the sequence has not been preempted since the step was sent."""
        return self.residencies.get(sequence.id) == sequence.residency


NEW_RULES_VERSION = 4  # of the protocol: the first whose stages read parameters that need new stages


@dataclass(slots=True)
class SchedulerDecision:
    """The scheduler's last decision, for reports."""

    mode: str = ""  # active mode: "batch" or "overlapped"
    depth: int = 0  # maximum number of steps in flight
    step_budget: int = 0  # tokens that a step may have in addition to the next tokens of running answers
    prompt_tokens: int = 0  # prompt tokens within ``step_budget``
    throttle: str = "none"  # what limits prompts: "none", "pending" (shared out over the pipeline), "kv" or "time"


@dataclass(slots=True)
class AcceptState:
    """Listeners that do not accept new connections, for reports. ``problem`` is set while one is closed."""

    problem: str = ""
    reason: str = ""  # text of the last problem
    num_closures: int = 0  # how often listeners were closed
    closed_s: float = 0.0  # seconds in total, without the current period
    opened_at: float = 0.0  # time at which the last listener was opened again
    closed: set[str] = field(default_factory=set)  # names of the closed listeners
    closed_at: float = 0.0
    retry_at: float = 0.0  # time at which free file descriptors are checked for again
    pause_s: float = 0.0  # seconds between two checks

    def notes(self, now: float) -> list[str]:
        """Return a note about past closures, kept while this broker lives. While a listener is closed, ``problem``
        covers it."""
        if self.problem or not self.num_closures:
            return []
        often = "once" if self.num_closures == 1 else f"{self.num_closures} times"
        ago_s = now - self.opened_at
        return [
            f"new connections were kept waiting {often}, {self.closed_s:.1f} s in all, until {ago_s:.0f} s ago: "
            f"{self.reason}"
        ]


@dataclass(slots=True)
class JoinTicket:
    """A ``swarmctl join`` in progress."""

    asker: bytes  # routing id of the client that asked
    host: bytes  # routing id of the host that was asked to start a worker


@dataclass(slots=True)
class HostRegistry:
    """Hosts that can start workers, by connection, and the clients that have asked for workers."""

    connected: dict[bytes, HostHello] = field(default_factory=dict)
    tickets: dict[int, JoinTicket] = field(default_factory=dict)
    next_ticket: int = 1

    def register_join(self, asker: bytes, host: bytes) -> int:
        """Register a join; return the ticket number that the host puts into its answer."""
        number, self.next_ticket = self.next_ticket, self.next_ticket + 1
        self.tickets[number] = JoinTicket(asker, host)
        return number

    def check(self) -> str | None:
        """Return the first broken invariant as text, or None."""
        if any(ticket.host not in self.connected for ticket in self.tickets.values()):
            return "a join waits for a host that is gone"
        return None


@dataclass(slots=True)
class KeyState:
    """Public keys that the broker's own listeners accept (``members.keyring``), and the keys last sent to each."""

    accepted: OrderedDict[str, None] = field(default_factory=OrderedDict)
    must_resend: bool = False  # the listeners must be sent the keys again
    sent_keys: dict[str, frozenset[str]] = field(default_factory=dict)  # by listener: keys it was last sent
    sent_tickets: frozenset[str] = frozenset()  # relay tickets it was last sent


@dataclass(slots=True)
class ModelUpload:
    """A file of the model that the broker has requested from the worker ``incarnation``."""

    asset: Asset
    incarnation: str
    received_at: float  # time at which its last part arrived
    data: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class DataPathErrors:
    """Failures of the data path since the last completed step, without the loss of a worker."""

    num_lost: int = 0  # number of times that steps were lost
    num_damaged: int = 0  # number of damaged messages

    def reset(self) -> None:
        self.num_lost = self.num_damaged = 0


@dataclass(slots=True)
class State:
    """The complete state of the broker. Only ``core`` and its parts change it."""

    lineage: Lineage = NO_LINEAGE  # of this broker process
    base_manifest: Manifest | None = None  # the model as workers report it
    manifest: Manifest | None = None  # the model with the adapters that are loaded at run time
    adapters: AdapterState = field(default_factory=AdapterState)
    assets: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[str, ModelUpload] = field(default_factory=dict)  # files that are being transferred, by name
    requests: dict[str, Request] = field(default_factory=dict)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    ended_requests: EndedRequests = field(default_factory=EndedRequests)  # requests that have ended
    # messages about requests that are not in memory
    journal_lookups: JournalLookups = field(default_factory=JournalLookups)
    # reasons for requests that are not available
    forgotten: ForgottenRequests = field(default_factory=ForgottenRequests)
    # clients whose connection is blocked -> time of the next try
    blocked_clients: dict[bytes, float] = field(default_factory=dict)
    timers: RequestTimers = field(default_factory=RequestTimers)  # when requests must be checked
    awaiting_journal: AwaitingJournal = field(default_factory=AwaitingJournal)  # requests that wait for the journal
    retry_after: RetryAfter = field(default_factory=RetryAfter)
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    running: RunningSequences = field(default_factory=RunningSequences)
    # sequences whose deadline can't be met any more: to be ended
    deadline_unreachable: list[Sequence] = field(default_factory=list)
    costs: StepCosts = field(default_factory=StepCosts)
    decision: SchedulerDecision = field(default_factory=SchedulerDecision)
    to_release: list[int] = field(default_factory=list)  # sequences that the stages release with the next step
    # ended sequences whose prefix the stages keep with the next step
    to_retire: list[SequencePosition] = field(default_factory=list)
    # running sequences that have given back blocks of refused proposals: the next step cuts them in the stages
    to_truncate: list[Sequence] = field(default_factory=list)
    journal_notes: tuple[str, ...] = ()  # damage found in the journal
    journal_problem: str = ""  # why the journal can't be written at present
    journal_figures: Json = field(default_factory=dict)
    process_figures: dict[str, float] = field(default_factory=dict)
    accept: AcceptState = field(default_factory=AcceptState)
    keys: KeyState = field(default_factory=KeyState)
    hosts: HostRegistry = field(default_factory=HostRegistry)
    data_path_errors: DataPathErrors = field(default_factory=DataPathErrors)
    evidence: Evidence = field(default_factory=Evidence)
    recoveries: RecoveryHistory = field(default_factory=RecoveryHistory)
    prefix: PrefixCache = field(default_factory=lambda: PrefixCache(PrefixRules(is_enabled=False)))
    # positions of running and retired sequences that count once, though several of them hold them
    shared: SharedPositions = field(default_factory=SharedPositions)
    prefixes: PlanPrefixes = field(default_factory=PlanPrefixes)  # of the account, over a change of plan
    workers: dict[str, Worker] = field(default_factory=dict)
    # non-members: incarnation -> time of the last message sent to it
    non_members: dict[str, float] = field(default_factory=dict)
    newcomers: Newcomers = field(default_factory=Newcomers)
    replaced: dict[str, str] = field(default_factory=dict)  # incarnation -> why it was ordered to end
    leases_renewed_at: float = 0.0
    routes: Routes = field(default_factory=Routes)
    constraints: PlanConstraints = field(default_factory=PlanConstraints)
    plans: PlanState = field(default_factory=PlanState)
    migration: MigrationState = field(default_factory=MigrationState)  # copies for a change of plan
    moves: PlanMoves = field(default_factory=PlanMoves)
    restart: RestartState = field(default_factory=RestartState)  # the start after a restart of the broker
    rebuilding: Rebuilding = field(default_factory=Rebuilding)
    restores: RestoreState = field(default_factory=RestoreState)  # sequences that the stages read from disk
    kv_copies: KvCopyState = field(default_factory=KvCopyState)
    images: ImageState = field(default_factory=ImageState)
    rechecks: RecheckSchedule = field(default_factory=RecheckSchedule)
    in_flight: dict[int, InFlightStep] = field(default_factory=dict)
    next_step: int = 1
    next_sequence: int = 1
    counters: dict[str, float] = field(default_factory=dict)
    started_at: float = 0.0
    now: float = 0.0  # time of the event being handled
    ticked_at: float = 0.0  # time of the last tick

    def check(self) -> Iterator[str]:
        """Yield every broken invariant. Between two events there is none."""
        num_running = 0
        for sequence in self.sequences.values():
            num_running += sequence.state is SequenceState.RUNNING
            if wrong := sequence.check():
                yield wrong
        if num_running != len(self.running) or any(s.state is not SequenceState.RUNNING for s in self.running):
            yield f"{num_running} sequences run, {len(self.running)} are in the list"
        waiting = sum(s.state is SequenceState.WAITING and s.request.accepted for s in self.sequences.values())
        if waiting != len(self.waiting) + len(self.deadline_unreachable):
            yield f"{waiting} accepted sequences wait for blocks, {len(self.waiting)} are in the queue"
        if any(s.state is not SequenceState.WAITING for s in self.waiting):
            yield "a sequence waits that runs or has ended"
        if len({s.id for s in self.waiting}) != len(self.waiting):
            yield "a sequence waits twice"
        if self.running.blocks != sum(s.blocks for s in self.running):
            yield f"{self.running.blocks} blocks are counted, and should be {sum(s.blocks for s in self.running)}"
        if self.in_flight and self.plans.current is None:
            yield "steps are in flight without a plan"
        if self.plans.is_serving and (wrong := self.running.check()):
            yield wrong
        if self.plans.is_serving and self.reserved_blocks > self.plans.kv_blocks:
            yield f"{self.reserved_blocks} blocks are reserved of {self.plans.kv_blocks}"
        if self.plans.is_serving and len(self.running) > self.plans.max_sequences:
            yield f"{len(self.running)} sequences run, the stages hold {self.plans.max_sequences}"
        yield from self._check_prefixes()
        yield from self._check_parts()

    def _check_prefixes(self) -> Iterator[str]:
        """Yield every broken invariant of what sequences share, or can start from."""
        if any(s.kv < self.shared.stop(s.id) for s in self.running):
            yield "a sequence shares positions that it would compute again"
        if any(s.kv < self.prefix.index.num_blocks(s.id) * BLOCK for s in self.running):
            yield "sequences can start from positions that their source would compute again"

    def _check_parts(self) -> Iterator[str]:
        """Yield every broken invariant outside of sequences."""
        current, rebuilding = self.plans.current, self.rebuilding
        lost_members = (
            {i for i in current.members if i not in self.workers or self.workers[i].is_gone} if current else set()
        )
        if lost_members:
            yield f"the active plan includes {sorted(lost_members)}, which are gone"
        if current is None and not rebuilding.is_idle:
            yield "layers are rebuilt without a plan"
        if len({s.id for s in rebuilding.in_progress}) != len(rebuilding.in_progress):
            yield "the layers of a sequence are rebuilt twice"
        not_ended = [i for i in self.ended_requests.weights if i not in self.requests or not self.requests[i].has_ended]
        if not_ended:
            yield f"{not_ended} are listed as ended, but are not"
        if bool(self.accept.closed) is not bool(self.accept.problem):
            yield f"listeners {sorted(self.accept.closed)} are closed, the reported problem is {self.accept.problem!r}"
        if (
            wrong := self.plans.check()
            or self.hosts.check()
            or self.ended_requests.check()
            or self.journal_lookups.check()
        ):
            yield wrong

    def shift_deadlines(self, pause_s: float, now: float) -> None:
        """Shift deadlines by a pause of the broker itself, which must not count as lateness of others. Deadlines move
        into the future; times of past messages are treated as more recent.

        Times at which something is only retried do not move (a refused load, a blocked route, a closed listener, a file
        requested from another worker, a repeated order, the end of a comparison): after a pause they come early, which
        does no harm.
        """
        self.ticked_at += pause_s
        self.adapters.shift_deadlines(pause_s)
        self.restart.shift_deadlines(pause_s)
        self.plans.deadline += pause_s
        self.plans.members_changed_at += pause_s
        self.migration.shift_deadlines(pause_s)
        self.moves.shift_deadlines(pause_s)
        self.rebuilding.ordered_at += pause_s
        self.restores.shift_deadlines(pause_s)
        self.timers.shift_deadlines(pause_s)
        self.journal_lookups.shift_deadlines(pause_s)
        self.newcomers.shift_deadlines(pause_s)
        for worker in self.workers.values():
            worker.shift_deadlines(pause_s, now)
        for flight in self.in_flight.values():
            flight.sent_at = min(now, flight.sent_at + pause_s)
        for request in self.requests.values():
            request.shift_deadlines(pause_s)

    def set_manifest(self, manifest: Manifest | None) -> None:
        """Set the model, as workers report it; None if it is to be replaced by another one."""
        self.base_manifest = manifest
        self.manifest = None if manifest is None else self.adapters.apply(manifest)

    @property
    def state_stride(self) -> int:
        """Positions between the model's states that stages keep; 0: its layers keep none, or there is no model."""
        return 0 if self.manifest is None else self.manifest.state_stride

    @property
    def present_workers(self) -> list[Worker]:
        """The workers that are not gone."""
        return [worker for worker in self.workers.values() if not worker.is_gone]

    def adapter_error(self, adapter: str) -> str | None:
        """Return why no sequence can have this adapter, a name or a key; None if one can, or there is no model."""
        if adapter in self.adapters.keys or self.manifest is None:
            return None
        return self.manifest.adapter_error(adapter)

    def set_constraints(self, steering: PlanConstraints) -> None:
        """Set the operator's constraints for plans."""
        self.constraints = steering

    def give_up_deadline(self, sequence: Sequence) -> None:
        """Queue a sequence whose deadline can't be met any more; the core ends it."""
        self.deadline_unreachable.append(sequence)

    def take_deadline_unreachable(self) -> list[Sequence]:
        """Remove and return the sequences to be ended, the last one first."""
        sequences, self.deadline_unreachable = self.deadline_unreachable[::-1], []
        return sequences

    @property
    def reserved_blocks(self) -> int:
        """KV blocks of all sequences in the stages; shared ones count once."""
        return self.running.blocks + self.prefix.num_blocks - self.shared.saved // BLOCK

    @property
    def cached_blocks(self) -> int:
        """KV blocks that only retired sequences hold."""
        return self.prefix.exclusive_blocks(self.shared)

    @property
    def borrowed_blocks(self) -> int:
        """KV blocks that running sequences hold for proposed tokens in flight only."""
        return sum(
            sequence.blocks - proposal.blocks
            for flight in self.in_flight.values()
            for sequence, _ in flight.sequences
            if sequence.state is SequenceState.RUNNING
            and flight.is_current(sequence)
            and (proposal := flight.proposals.get(sequence.id)) is not None
        )

    @property
    def has_work_in_flight(self) -> bool:
        """Whether steps or replays are in flight."""
        return bool(self.in_flight) or bool(self.rebuilding.in_progress)

    def record_dispatch(
        self,
        num_tokens: int,
        ends: tuple[tuple[Sequence, int], ...],
        now: float,
        proposals: dict[int, InFlightProposal],
        *,
        seen: tuple[int, ...] = (),
        num_patches: int = 0,
    ) -> None:
        """Record the step that has just been sent. It has also carried the releases to the stages. ``num_tokens``:
        positions that it computes, those of proposed tokens included. ``seen`` and ``num_patches``: of its parts of
        images."""
        stays = {sequence.id: sequence.residency for sequence, _ in ends}
        self.in_flight[self.next_step] = InFlightStep(ends, now, num_tokens, stays, proposals, seen, num_patches)
        self.next_step += 1
        self.to_release.clear()
        self.to_retire.clear()
        self.to_truncate.clear()
        for sequence, _ in ends:
            self.running.refresh(sequence)

    def record_step(self, flight: InFlightStep, num_running: int, num_refused: int, now: float) -> None:
        """Record the time of a completed step, unless it had no rows: it only opened or released sequences.
        ``num_running``: running sequences before its tokens were collected. ``num_refused``: its proposed tokens that
        were not accepted."""
        if flight.num_patches:
            tokens_s = self.costs.expected_s(flight.num_tokens) if flight.num_tokens else 0.0
            busy_s = now - max(flight.sent_at, self.costs.last_done_at)
            self.images.record_time(flight.num_patches, busy_s - (tokens_s or 0.0))
        if not flight.num_tokens:
            self.costs.last_done_at = now
            return
        num_proposed = sum(len(proposal.tokens) for proposal in flight.proposals.values())
        if flight.num_tokens - num_proposed == len(flight.sequences) and not flight.num_patches:  # decodes only
            busy_s = now - max(flight.sent_at, self.costs.last_done_at)
            self.moves.rates.record(num_running, len(flight.sequences), num_proposed, busy_s)
        self.costs.record_step(flight.num_tokens, flight.sent_at, now, num_refused, has_more=bool(flight.num_patches))

    def outdated_worker(self, params: SamplingParams) -> str:
        """Return the name of a stage's worker that refuses sequences with these parameters; empty: none does."""
        plan = self.plans.current
        if plan is None or not params.needs_new_stages:
            return ""
        workers = (self.workers.get(stage.incarnation) for stage in plan.stages)
        return next((w.name for w in workers if w and max(w.hello.wire_versions) < NEW_RULES_VERSION), "")

    def return_blocks(self, sequence: Sequence, blocks: int) -> None:
        """Reduce the KV blocks of a sequence whose proposed tokens were refused. The next step cuts it in the stages,
        before others get the blocks."""
        if blocks < sequence.blocks:
            self.to_truncate.append(sequence)
        self.running.resize(sequence, blocks)

    def find_proposal(self, sequence: int) -> InFlightProposal | None:
        """Return the proposed tokens of a sequence in flight; None if there are none."""
        found = (flight.proposals.get(sequence) for flight in self.in_flight.values())
        return next((proposal for proposal in found if proposal is not None), None)

    def complete_step(self, step: int) -> InFlightStep | None:
        """Remove and return a completed step; None if it is not in flight any more."""
        return self.in_flight.pop(step, None)

    def evict(self, blocks: int, slots: int) -> None:
        """Evict retired sequences until this number of blocks and slots is free."""
        self.to_release.extend(self.prefix.evict(blocks, slots, self.shared))

    def release_ended(self, sequence: Sequence) -> None:
        """Take an ended sequence out of the stages: with the next step its blocks are freed, or what others can start
        from is kept."""
        self.running.remove(sequence)
        sequence.cancel_rebuilds()
        self.release_fork(sequence)
        if self.manifest is not None:
            held = self.prefix.index.num_blocks(sequence.id) * BLOCK
            if held != sequence.block_state or sequence.scheduled > sequence.kv:
                held = self.manifest.floor_to_state(held)
            self.prefix.index.shorten(sequence.id, held)
        retired = self.prefix.retire(sequence.id, self.plans.kv_blocks, has_states=self.state_stride > 0)
        if retired is None:
            self.shared.release(sequence.id)
            self.to_release.append(sequence.id)
            return
        self.shared.retire(sequence.id)
        self.evict(self.prefix.excess_blocks(self.plans.kv_blocks, self.shared), 0)
        if sequence.id in self.prefix.retired:
            self.to_retire.append(SequencePosition(sequence.id, retired.num_blocks * BLOCK))

    def preempt(self, sequence: Sequence) -> None:
        """Preempt a running sequence: its blocks are freed with the next step, and it waits to be computed again."""
        sequence.num_preempted += 1
        self.count("preemptions")
        self.send_back(sequence)

    def send_back(self, sequence: Sequence) -> None:
        """Let a running sequence wait again; the stages release it with the next step."""
        self.running.remove(sequence)
        self.release_fork(sequence)
        self.prefix.index.forget(sequence.id)
        self.shared.release(sequence.id)
        self.to_release.append(sequence.id)
        sequence.requeue()
        self.waiting.add(sequence)

    def redraw_last(self, sequence: Sequence) -> None:
        """Let the next step compute a sequence's last position again, for a draw that was postponed. Until then no
        other sequence starts from that position: the stages are about to cut it off."""
        sequence.redraw_last()
        self.prefix.index.shorten(sequence.id, sequence.kv)
        self.running.refresh(sequence)

    def release_fork(self, sequence: Sequence) -> None:
        """Release the pin on the sequence that this one was to be copied from."""
        if sequence.fork_of is not None:
            self.prefix.unpin(sequence.fork_of)
            sequence.fork_of = None

    def clear_stages(self) -> None:
        """Clear everything in flight at a new epoch: the stages keep only what they are ordered to."""
        self.in_flight.clear()
        self.to_release.clear()
        self.to_retire.clear()
        self.to_truncate.clear()
        self.prefix.clear()
        self.prefixes.lacking.clear()
        self.images.clear()
        self.restores.end_plan()
        if self.shared.num_mappings:  # otherwise the account was cleared before
            self.prefixes.before, self.shared = self.shared, SharedPositions()
        self.shared.clear(self.plans.share_unit if self.prefix.rules.is_enabled else 0)
        self.waiting.restore_aside()

    def count(self, name: str, amount: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount
