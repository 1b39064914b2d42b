"""Admission of workers: which workers become members, under which name, and what the broker answers.

Members run this build, and bring a device that can be planned with, the swarm's model and enough memory and speed. If
two processes have the same name, ``worker_names`` decides which one counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from swarm.broker.actions import Outbox, SendToWorker
from swarm.broker.members import worker_names
from swarm.broker.members.adapters import VERSION as ADAPTERS_VERSION
from swarm.broker.members.adapters import AdapterManager
from swarm.broker.members.assets import Uploads
from swarm.broker.members.health import HealthLimits
from swarm.broker.members.keyring import Keyring
from swarm.broker.members.recheck import RecheckSettings
from swarm.broker.planning.rules import DEVICES, PlanRules, is_supported
from swarm.broker.recovery.rebuild import trusted_positions
from swarm.broker.recovery.reconfiguration import Reconfiguration
from swarm.broker.recovery.restart import Restart
from swarm.broker.requests.requests import RequestHandler
from swarm.broker.state import State, Worker, WorkerState
from swarm.broker.state.newcomers import NameClaim
from swarm.broker.state.workers import Verdict
from swarm.wire.greeting import Greeting, incompatibility
from swarm.wire.messages import Denied, Hello, Manifest, Unassign, Welcome
from swarm.wire.schema import schema

T = TypeVar("T")

IMAGES_VERSION = 4  # of the protocol: the first with models that read images
MAX_REMEMBERED = 64  # incarnations remembered, so that they are not called too often, and not admitted again


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """Settings sent to workers when they join, and the rules by which they are judged."""

    heartbeat_endpoint: str
    data_endpoint: str
    beat_interval_s: float
    lease_s: float
    health: HealthLimits
    recheck: RecheckSettings
    key: str | None = None  # the broker's public key, where connections are authenticated by keys
    dtype: str = ""  # type of the weights at all workers; empty: the first worker's


class OnWorkerLost(Protocol):
    """Callback that puts a worker out, with the evidence."""

    def __call__(self, worker: Worker, evidence: str, now: float) -> None: ...


class WorkerAdmission:
    """Answers workers' Hello messages. Appends the resulting actions to ``out``."""

    def __init__(
        self,
        state: State,
        settings: MemberSettings,
        reconfiguration: Reconfiguration,
        requests: RequestHandler,
        out: Outbox,
        *,
        adapters: AdapterManager,
        keyring: Keyring,
        uploads: Uploads,
        on_worker_lost: OnWorkerLost,
    ) -> None:
        self._state = state
        self._settings = settings
        self._reconfiguration = reconfiguration
        self._requests = requests
        self._out = out
        self._adapters = adapters
        self._keyring = keyring
        self._uploads = uploads
        self._on_worker_lost = on_worker_lost

    def on_hello(self, claim: NameClaim, now: float) -> None:
        peer, hello, owner = claim.peer, claim.hello, claim.owner
        restart, rules = self._reconfiguration.restart, self._reconfiguration.target.rules
        # A worker that was ordered to end may not have received that message yet: admitted now, it would be a member
        # that ends.
        reason = self._state.replaced.get(hello.incarnation) or admission_error(hello, self._state, restart, rules)
        reason = reason or name_error(hello.name, owner, self._state)
        reason = reason or unreachable_reason(claim, self._state)
        if reason is not None:
            self._deny(peer, hello, reason, now)
            return
        dtype = required_dtype(hello, self._state, self._settings.dtype)
        common = self._common_dtype(hello) if dtype and dtype not in hello.dtypes else ""
        if common:
            self._change_dtype(common, hello, now)
            dtype = common if common != hello.dtype else ""
        if dtype and (has_auto_dtype(hello) or self._settings.dtype or not self._may_replace_model(hello)):
            self._deny_dtype(peer, hello, dtype, now)
            return
        record = self._state.workers.get(hello.incarnation)
        if record is not None and record.state is WorkerState.LEFT:
            self._out.append(SendToWorker(peer, record.build_release(self._state.plans.journaled_epoch)))
            return
        former = worker_names.find_holder(hello, self._state)
        if former is not None and not worker_names.should_yield(former, hello, owner, self._state):
            self._state.newcomers.add_claim(claim)
            return
        if self._adapters.may_join(peer, hello, now):
            self._admit(claim, record, now)

    def settle_claims(self, now: float) -> None:
        """Answer the workers that wait for a name, once it is clear whether the current holder of the name lives."""
        newcomers = self._state.newcomers
        for claim in list(newcomers.claims.values()):
            former = worker_names.find_holder(claim.hello, self._state)
            if former is None or worker_names.should_yield(former, claim.hello, claim.owner, self._state):
                newcomers.drop_claim(claim.hello.incarnation)
                self.on_hello(claim, now)
            elif worker_names.is_proven_alive(former, claim.since):
                reason = worker_names.name_taken_reason(former)
                remember_bounded(self._state.replaced, claim.hello.incarnation, reason)
                self._deny(claim.peer, claim.hello, reason, now)

    def _deny(self, peer: bytes, hello: Hello, reason: str, now: float) -> None:
        self._state.newcomers.drop_claim(hello.incarnation)
        self._state.newcomers.record_refusal(hello, reason, now)
        self._out.note("worker_denied", "warning", worker=hello.name, reason=reason)
        self._out.append(SendToWorker(peer, Denied(reason=reason)))

    def _deny_dtype(self, peer: bytes, hello: Hello, dtype: str, now: float) -> None:
        """Deny a worker that has the swarm's model with another type of weights. It restarts with the swarm's type if
        it can."""
        reason = dtype_error(hello.dtype, dtype)
        if not has_auto_dtype(hello):
            self._deny(peer, hello, reason, now)
            return
        self._state.newcomers.drop_claim(hello.incarnation)
        self._out.note("worker_recast", worker=hello.name, dtype=dtype, instead_of=hello.dtype)
        self._out.append(SendToWorker(peer, Denied(reason=reason, dtype=dtype)))

    def _common_dtype(self, hello: Hello) -> str:
        """Return the dtype to which all members must switch for this worker, which can't compute in theirs; empty if
        there is none, or if it is too late: a plan has been made, or the settings decide."""
        if self._settings.dtype or self._state.plans.epoch:
            return ""
        members = [worker.hello for worker in self._state.present_workers]
        choices = [each for each in (hello.dtype, *hello.dtypes) if each in hello.dtypes]
        return next((each for each in choices if all(each in member.dtypes for member in members)), "")

    def _change_dtype(self, dtype: str, hello: Hello, now: float) -> None:
        """Let all members restart with weights of this type, in which they and the new worker can compute."""
        for member in self._state.present_workers:
            reason = f"worker {hello.name} can't compute in {member.hello.dtype}, so the swarm computes in {dtype}"
            self._out.note("worker_recast", worker=member.name, dtype=dtype, instead_of=member.hello.dtype)
            self._out.append(SendToWorker(member.peer, Denied(reason=reason, dtype=dtype)))
            self._on_worker_lost(member, reason, now)
        self._state.set_manifest(None)

    def _may_replace_model(self, hello: Hello) -> bool:
        return may_replace_model(hello, self._state, self._reconfiguration.restart)

    def _admit(self, claim: NameClaim, record: Worker | None, now: float) -> None:
        """Admit a worker. ``record``: what the broker recorded about it if it has sent Hello before."""
        peer, hello, owner = claim.peer, claim.hello, claim.owner
        self._state.newcomers.drop_claim(hello.incarnation)
        if record is not None and not record.is_gone:
            self._on_worker_lost(record, "it sent Hello again: its work in flight is void", now)
        namesakes = [worker for worker in self._state.workers.values() if worker.name == hello.name]
        for other in namesakes:
            if other.incarnation != hello.incarnation:
                self._replace(other, hello, now)
        self._adopt_model(hello, now)
        num_lies = record.num_corrupt_results if record is not None else 0
        pace = record.pace if record is not None else _initial_pace(self._state, hello.host)
        worker = self._state.workers[hello.incarnation] = Worker(
            hello, peer, now, num_corrupt_results=num_lies, pace=pace, key_owner=owner
        )
        # A new process may have the broken device of the one before it.
        worker.num_faults = max((each.num_faults for each in namesakes), default=0)
        worker.num_removals = max((each.num_removals for each in namesakes), default=0)
        worker.call_after = max((each.call_after for each in namesakes), default=0.0)
        # Of a worker that is back after differences from the plan, its weights count, and nothing of its sequences.
        may_sequences_count = worker.is_trusted and (record is None or record.verdict is not Verdict.DIFFERS)
        worker.record_held(
            hello.kept if worker.is_trusted else (),
            trusted_positions(hello, self._state) if may_sequences_count else {},
        )
        self._keyring.add(hello.key)
        self._state.routes.set_relay_only(worker.incarnation, claim.not_at)
        if claim.not_at:
            self._out.note("worker_by_relay_only", "warning", worker=hello.name, reason=claim.not_at)
        self.welcome(worker, self._uploads.assign(worker, now))
        if self._state.plans.current is not None or not may_sequences_count:
            # The active plan was made without this worker: what it still holds of the sequences is of no use any more.
            # If it ever sent corrupt results, or was out because its steps raised, its keys and values are not trusted
            # at any of its returns; if it differed from the plan, they are not at this one.
            self._out.append(SendToWorker(peer, Unassign(epoch=self._state.plans.journaled_epoch)))
        self._reconfiguration.on_members_changed(now)
        self._out.note("worker_joined", worker=hello.name, device=hello.device, memory_mib=hello.memory_bytes >> 20)

    def _adopt_model(self, hello: Hello, now: float) -> None:
        """Adopt the first worker's model. After a restart the model is already known; if the first worker brings
        another one, that becomes the swarm's model, and the requests for the old one end, since they can't be answered
        any more."""
        restart, remembered_model = self._state.restart, self._state.base_manifest
        if restart.model_is_remembered and remembered_model is not None:
            difference = remembered_model.difference(hello.manifest)
            if difference is not None:
                self._adapters.forget()
                self._state.set_manifest(None)
                self._requests.completer.end_everything(
                    f"the swarm was started again with another model: {difference}", now
                )
        restart.confirm_model()
        if self._state.manifest is None:
            if not self._state.adapters.fit(hello.manifest):
                self._adapters.forget()
            self._state.set_manifest(hello.manifest)
            self._requests.durability.on_model_known(now)

    def _replace(self, former: Worker, hello: Hello, now: float) -> None:
        """Remove the former holder of a worker name. If that process lives, it must end."""
        if not former.is_gone:
            reason = (
                f"another process (pid {hello.pid} on {hello.host}) has taken over the name {hello.name}: "
                f"give every worker a name of its own"
            )
            self._out.append(SendToWorker(former.peer, Denied(reason=reason)))
            remember_bounded(self._state.replaced, former.incarnation, reason)
        if former.verdict is Verdict.FAILED and not former.is_revoked:
            self._state.evidence.record_replaced(former.incarnation, former.name)
        self._on_worker_lost(former, f"replaced by a new process (pid {hello.pid})", now)
        del self._state.workers[former.incarnation]
        self._state.routes.set_relay_only(former.incarnation, "")
        remember_bounded(self._state.non_members, former.incarnation, now)

    def welcome(self, worker: Worker, wants: tuple[str, ...]) -> None:
        """Send a worker its Welcome. The broker sends another Welcome to a member from which it requests files."""
        welcome = Welcome(
            epoch=self._state.plans.journaled_epoch,
            beat_endpoint=self._settings.heartbeat_endpoint,
            data_endpoint=self._settings.data_endpoint,
            beat_interval_s=self._settings.beat_interval_s,
            lease_s=self._settings.lease_s,
            wants=wants,
        )
        self._out.append(SendToWorker(worker.peer, welcome))

    def deny_unreadable(self, peer: bytes, reason: str) -> None:
        """Deny a peer whose message can't be decoded: most likely a worker of another build that waits for an answer to
        its Hello. A member stays: one unreadable message is no reason to end it."""
        worker = self._state.workers.get(peer.decode(errors="replace"))
        if worker is None or worker.is_gone:
            reason = f"the broker can't decode its message ({reason}): install the same version on both"
            self._out.append(SendToWorker(peer, Denied(reason=reason[:4000])))


# --- admission checks -------------------------------------------------------------------------------------------------


def admission_error(hello: Hello, state: State, restart: Restart, rules: PlanRules) -> str | None:
    """Return the reason why this worker is not admitted; None if it is."""
    theirs = Greeting(versions=hello.wire_versions, schema=hello.schema, build="")
    if (incompatible := incompatibility(theirs, schema())) is not None:
        return incompatible
    if not is_supported(hello.device):
        return f"device {hello.device!r} is none of {', '.join(DEVICES)}"
    wanted = None if may_replace_model(hello, state, restart) else state.base_manifest
    if wanted is not None and (difference := _model_error(hello, wanted)) is not None:
        return difference
    if state.adapters.entries and max(hello.wire_versions) < ADAPTERS_VERSION:
        return "this swarm has loaded adapters, for which this worker is too old: upgrade it"
    return rules.admission_error(hello)


def _model_error(hello: Hello, wanted: Manifest) -> str | None:
    """Return why a worker with its model is not admitted; None if it differs in its dtype at most."""
    manifest = hello.manifest
    if wanted.differs_only_in_weights(manifest):
        return weights_error(manifest, wanted)
    if wanted.differs_in_images(manifest):
        if max(hello.wire_versions) < IMAGES_VERSION:
            return "this swarm reads images, for which this worker is too old: upgrade it"
        here, there = ("text only", "images") if wanted.vision is None else ("images", "text only")
        values = "set worker.images to the same value for all workers"
        return f"this swarm reads {here}, and this worker {there}: {values}"
    difference = wanted.difference(manifest)
    if difference is None or wanted.differs_only_in_dtype(manifest):
        return None
    return f"this swarm serves another model: {difference}"


def may_replace_model(hello: Hello, state: State, restart: Restart) -> bool:
    """Whether this worker's model becomes the swarm's, whatever the swarm's model was. After a restart one of the known
    workers may bring another model; an unknown worker must not replace the model of the workers that are still awaited.
    """
    if state.manifest is None:
        return True
    is_expected = hello.name in state.restart.awaited or restart.wait_reason(state.now) is None
    return state.restart.model_is_remembered and is_expected


def required_dtype(hello: Hello, state: State, wanted: str) -> str:
    """Return the dtype of weights to which this worker must switch; empty if it need not.

    ``wanted``: dtype from the settings. Without it, the dtype of the swarm's model counts, if the worker's model
    differs from that only in its dtype.
    """
    model = state.base_manifest
    if not wanted and (model is None or not model.differs_only_in_dtype(hello.manifest)):
        return ""
    dtype = wanted or (hello.dtype if model is None else model.dtype)
    return dtype if dtype != hello.dtype else ""


def has_auto_dtype(hello: Hello) -> bool:
    """Whether this worker's settings leave the type of its weights to the swarm. (Older builds don't report it.)"""
    return any(setting.name == "worker.dtype" and setting.value == '"auto"' for setting in hello.settings)


def dtype_error(dtype: str, wanted: str) -> str:
    """Return why a worker with weights of this type is not admitted, and what to set."""
    gpu = " (on a GPU)" if wanted == "float16" else ""
    there = f'set worker.dtype = "{wanted}" there{gpu}, or '
    return (
        f"this swarm computes in {wanted}, and this worker in {dtype}: {there}start all workers with "
        'worker.dtype = "float32", which every device can'
    )


def weights_error(manifest: Manifest, wanted: Manifest) -> str:
    """Return why a worker whose weights or activations are quantized otherwise is not admitted, and what to set."""
    if manifest.weights != wanted.weights:
        return (
            f"this swarm's weights are {_describe_weights(wanted)}, and this worker's {_describe_weights(manifest)}: "
            "set worker.weights (--weights), worker.weight_group, worker.embedding and worker.head to the same values "
            "for all workers, and install the same version"
        )
    here, there = (each.activations or wanted.dtype for each in (manifest, wanted))
    return (
        f"this swarm multiplies activations as {there}, and this worker as {here}: set worker.activations to the same "
        "value for all workers"
    )


def _describe_weights(manifest: Manifest) -> str:
    return manifest.weights or f"plain {manifest.dtype}"


def name_error(name: str, owner: str, state: State) -> str | None:
    """Return why this key's owner may not use this worker name, apart from the checks of ``broker.auth.access``; None
    if it may. A remote worker must not take the name of a worker on the broker's own machine: that worker shows no key,
    and would be ordered to end, as a process that has been replaced. ``owner``: see ``WorkerMessageReceived``."""
    if not owner or not _is_taken(name, owner, state):
        return None
    return f"the name {name} is that of a worker on the broker's own machine: name this one {owner}-SOMETHING (--name)"


def unreachable_reason(claim: NameClaim, state: State) -> str | None:
    """Return why no other stage could send steps to this worker; None if one can.

    A worker is unreachable if connections to its address are not permitted and it cannot be reached through the relay.
    """
    if not claim.not_at or (state.routes.relay and claim.hello.ticket):
        return None
    return f"{claim.not_at}; and it can't be reached by relay"


def _is_taken(name: str, owner: str, state: State) -> bool:
    """Whether the name belongs to another owner's worker that is connected or may come back."""
    namesakes = [worker for worker in state.workers.values() if worker.name == name]
    return any(worker.key_owner != owner and worker.state is not WorkerState.LEFT for worker in namesakes)


def _initial_pace(state: State, host: str) -> float:
    """Return the initial pace of a new worker: that of the quickest worker on its machine, until it is measured. If
    workers wait for each other's cores, a new one would otherwise seem to be worth all of them together."""
    return min((w.pace for w in state.workers.values() if w.hello.host == host and not w.is_gone), default=1.0)


def remember_bounded(memory: dict[str, T], incarnation: str, value: T) -> None:
    """Insert an entry as the newest one; drop the oldest one above ``MAX_REMEMBERED``."""
    memory.pop(incarnation, None)
    memory[incarnation] = value
    if len(memory) > MAX_REMEMBERED:
        del memory[next(iter(memory))]
