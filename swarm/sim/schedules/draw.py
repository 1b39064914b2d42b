"""One schedule from one seed: settings, machines, requests, weather and faults, each drawn from random numbers of its
own."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Literal, get_args

import msgspec

from swarm.broker.core import CoreSettings
from swarm.broker.planner.load import PlannedLoad
from swarm.broker.planning.rules import PlanRules
from swarm.broker.recovery.reconfiguration import ReconfigurationSettings
from swarm.broker.requests.completion import RequestSettings
from swarm.broker.state.prefix import PrefixRules
from swarm.broker.steps.scheduler import Mode, SchedulerSettings
from swarm.params import SamplingParams
from swarm.sim.network import CALM, Weather
from swarm.sim.schedules.schedule import (
    JOURNAL_FAULT_KINDS,
    JOURNAL_FAULTS,
    MIB,
    Fault,
    FaultKind,
    Machines,
    Schedule,
    ScheduledRequest,
    WorkerSpec,
)
from swarm.sim.world import Durations
from swarm.wire.messages import Submit

SMALL = 0.15  # share of schedules with a worker that is too small for its longer requests
# share of schedules whose first request exceeds the window of unacknowledged tokens: one is enough, and slow
LONG = 0.15
CROWDED = 0.25  # share of schedules in which many sequences grow and memory is so short that some are preempted
NO_SHARING = 0.3  # share of schedules in which no worker shares memory between sequences
MANY_CONTINUATIONS = 0.2  # share of the others in which prompts are continued many times
DEADLINE = 0.1  # share of requests with a deadline
SMALL_LOG = 0.25  # share of schedules whose activation logs are too small for the running sequences
BAD_WEATHER = 0.5
# Faults drawn from random numbers of their own (``variations``).
OTHER_FAULTS: tuple[FaultKind, ...] = ("client_dies", "door_shut", "read_fails", "compute_fails")
STEP_FAULTS: tuple[FaultKind, ...] = ("device_breaks", "request_fails")  # the same
CLIENT_FAULTS: tuple[FaultKind, ...] = ("client_freeze",)  # the same
KEY_FAULTS: tuple[FaultKind, ...] = ("key_revoked",)  # the same
SLEEP_FAULTS: tuple[FaultKind, ...] = ("broker_sleeps",)  # the same
KV_FAULTS: tuple[FaultKind, ...] = (  # the same
    *(
        "kv_lag",
        "kv_cut",
        "kv_garble",
        "kv_short",
        "kv_lost",
        "kv_store_fails",
        "kv_crash_at",
        "kv_owner",
        "kv_pair",
        "kv_stale",
        "kv_unshared",
    ),
)
ADAPTER_FAULTS: tuple[FaultKind, ...] = ("adapters_fail",)  # the same
BY_OWN_CHANCE: tuple[FaultKind, ...] = (
    *ADAPTER_FAULTS,
    *CLIENT_FAULTS,
    *JOURNAL_FAULTS,
    *OTHER_FAULTS,
    *STEP_FAULTS,
    *KEY_FAULTS,
    *SLEEP_FAULTS,
    *KV_FAULTS,
)
FAULT_KINDS: tuple[FaultKind, ...] = tuple(k for k in get_args(FaultKind) if k not in BY_OWN_CHANCE)
READ_ELSEWHERE = 0.1  # share of schedules in which requests are detached, and read by other clients
FROZEN_CLIENT = 0.05  # share of schedules in which a client is paused
FROZEN_S = (46.0, 55.0)  # longer than clients wait for a broker, shorter than ended requests are kept
CHANGED_JOURNAL = 0.05  # share of schedules in which another journal, or an older state of it, replaces the journal
AT_ONCE = 0.3  # share of faults that strike together with the previous one
ORDERS = ("Prepare", "Fence", "Activate", "Replay")  # a worker dies right before or after it handles one
ANSWERS = ("Prepared", "Activated", "ReplayDone", "StepDone")  # … or sends one

BROKER_POINTS = (  # the broker's events and actions, and points of its journal
    *("Submit", "Attach", "Ack", "Cancel", "Stop", "Hello", "Prepared", "Activated", "ReplayDone", "StepFinished"),
    *("EpochWritten", "AcceptanceWritten", "TokensWritten", "EndWritten", "RequestRead"),
    *("WriteEpoch", "WriteAcceptance", "WriteTokens", "WriteEnd", "Dispatch", "ConnectPipeline", "Welcome"),
    *("Prepare", "Fence", "Activate", "Replay", "Accepted", "Tokens", "Finished", "commit"),
)
LOST_JOURNAL = 0.15  # share of schedules in which the journal itself fails
NO_JOURNAL = 0.1  # share of schedules whose broker has no journal (and then never dies)
SLOW_DISK = 0.25  # share of schedules
GATHER_S = 6.0  # wait for workers from before a restart that may never return; less than a recovery may take


def make_schedule(seed: int, *, faults: bool = True) -> Schedule:
    """Return the schedule of a seed, always the same."""
    random = Random(f"schedule {seed}")
    num_layers = random.randint(2, 8)
    clients = tuple(random.choice([(0.0, 0.001), (0.0, 0.05), (0.5, 8.0)]) for _ in range(random.randint(1, 4)))
    schedule = Schedule(
        settings=_draw_demand(
            Random(f"demand {seed}"),
            _draw_prefix_cache(
                Random(f"beginnings {seed}"), _draw_rules(Random(f"rules {seed}"), _draw_settings(random))
            ),
        ),
        pace=_draw_durations(random),
        num_layers=num_layers,
        workers=_shrink_worker(Random(f"small {seed}"), _draw_workers(random, num_layers)),
        machines=_draw_machines(Random(f"machines {seed}")),
        clients=clients,
        requests=tuple(draw_request(random, number, len(clients)) for number in range(random.randint(1, 8))),
        faults=_draw_faults(Random(f"faults {seed}")) if faults else (),
    )
    schedule = _draw_journal(Random(f"disk {seed}"), schedule)
    schedule = _draw_priorities(Random(f"ranks {seed}"), schedule)
    if faults:
        schedule = _draw_weather(Random(f"hard {seed}"), schedule)
        schedule = _lose_journal(Random(f"lost {seed}"), schedule)
    crowd = Random(f"crowd {seed}")
    if crowd.random() < CROWDED:
        schedule = _make_crowded(crowd, schedule)
    schedule = _draw_sharing(Random(f"sharing {seed}"), schedule)
    readers = Random(f"readers {seed}")
    if readers.random() < READ_ELSEWHERE and schedule.settings.requests.has_journal:
        schedule = _add_readers(readers, schedule)
    if faults:
        schedule = _freeze_client(Random(f"clients {seed}"), schedule)
        schedule = _change_journal(Random(f"journals {seed}"), schedule)
    return schedule


def _draw_settings(random: Random) -> CoreSettings:
    mode: Mode = random.choice(["batch", "overlapped", "auto"])
    return CoreSettings(
        heartbeat_endpoint="beats",
        data_endpoint="broker",
        prefix=PrefixRules(is_enabled=random.random() < 0.7),
        requests=RequestSettings(client_grace_s=20.0, retain_s=60.0),
        scheduler=SchedulerSettings(
            mode=mode,
            step_tokens=random.choice([8, 32, 512]),
            prefill_chunk=random.choice([1, 7, 32, 256]),
            max_running=random.choice([1, 3, 64]),
        ),
        plan=ReconfigurationSettings(
            gather_s=GATHER_S, settle_s=random.choice([0.05, 0.5]), min_workers=random.choice([0, 0, 1])
        ),
    )


def _draw_rules(random: Random, settings: CoreSettings) -> CoreSettings:
    """Draw the constraints on plans."""
    rules = PlanRules(
        mode=settings.scheduler.mode,
        objective=random.choice(["auto", "throughput", "latency"]),
        load=PlannedLoad(random.choice([1, 8]), 64, random.choice([0.0, 1.0])),
        kv_positions=random.choice([0, 64, 1 << 20]),
        margin=random.choice([0.0, 0.1, 0.5]),
        caps={"w1": 2} if random.random() < 0.2 else {},
    )
    return replace(settings, plan=replace(settings.plan, rules=rules))


def _draw_demand(random: Random, settings: CoreSettings) -> CoreSettings:
    """Draw how soon the objective "auto" follows the load: so soon that plans change while requests come and go."""
    rules = replace(settings.plan.rules, quiet_s=random.choice([0.0, 0.1, 0.3, 2.0]))
    return replace(settings, plan=replace(settings.plan, rules=rules))


def _draw_prefix_cache(random: Random, settings: CoreSettings) -> CoreSettings:
    """Draw which beginnings of ended sequences stay stored, and how many."""
    if random.random() < 0.7:
        return settings
    policy: Literal["recent", "frequent"] = random.choice(["recent", "frequent"])
    return replace(settings, prefix=replace(settings.prefix, share=random.choice([0.05, 0.3, 1.0]), policy=policy))


def _draw_machines(random: Random) -> Machines:
    slowness = {f"w{number}": random.choice([1.0, 1.5, 4.0]) for number in range(4)}
    return Machines(slowness, measure=random.random() < 0.8, together=random.random() < 0.25)


def _draw_durations(random: Random) -> Durations:
    slow = random.choice([1.0, 1.0, 10.0])
    return Durations(control=(0.0001, 0.003 * slow), data=(0.0001, 0.002 * slow), compute=(0.0005, 0.005 * slow))


def _draw_workers(random: Random, num_layers: int) -> tuple[WorkerSpec, ...]:
    num = random.randint(1, 4)
    roomy = (64 + num_layers + 4) * MIB
    tight = (64 + num_layers // 2 + 3) * MIB
    return tuple(
        WorkerSpec(
            name=f"w{number}",
            joins_at=random.choice([0.2, 0.2, 2.0]) * random.random(),
            memory_bytes=roomy if number == 0 else random.choice([roomy, tight]),
            capacity=random.choice([1 << 9, 1 << 10, 1 << 14]),
        )
        for number in range(num)
    )


def _shrink_worker(random: Random, workers: tuple[WorkerSpec, ...]) -> tuple[WorkerSpec, ...]:
    """Perhaps shrink a worker; from its own random numbers, so that the rest of a schedule doesn't depend on it."""
    if random.random() >= SMALL:
        return workers
    small = random.randrange(len(workers))
    return tuple(replace(w, capacity=1 << 7) if i == small else w for i, w in enumerate(workers))


def draw_request(random: Random, number: int, num_clients: int) -> ScheduledRequest:
    n = random.choice([1, 1, 1, 2, 3])
    max_tokens = random.choice([1, 5, 30, 60])
    ignore_eos = random.random() < 0.5
    if number == 0 and random.random() < LONG:
        n, max_tokens, ignore_eos = 1, 380, True
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=random.choice([0.0, 0.8]),
        n=n,
        ignore_eos=ignore_eos,
        logprobs=random.choice([None, None, 1]),
    )
    prompt = tuple(random.randrange(97) for _ in range(random.choice([1, 2, 31, 32, 33, 100])))
    if random.random() < 0.5:  # many prompts have a common beginning
        shared = Random(random.randrange(2))
        prompt = tuple(shared.randrange(97) for _ in range(random.choice([32, 64, 80, 96]))) + prompt
    submit = Submit(request_id=f"r{number}", prompt=prompt, params=params, seed=random.randrange(2**32))
    stops = {index: random.randint(1, 20) for index in range(n) if random.random() < 0.1}
    return ScheduledRequest(
        submit=submit,
        at=random.uniform(0.3, 4.0),
        client=random.randrange(num_clients),
        leaves_after=random.choice([None, None, None, random.uniform(0, 1.0)]),
        stops=stops,
    )


def _draw_priorities(random: Random, schedule: Schedule) -> Schedule:
    """Draw priorities, tenants and deadlines, and the scheduler's targets for time and memory."""
    requests = tuple(
        replace_fields(
            spec,
            priority=random.choice([0, 0, 0, 50, -50]),
            tenant=random.choice(["", "", "a", "b"]),
            deadline_s=random.uniform(0.01, 10.0) if random.random() < DEADLINE else None,
        )
        for spec in schedule.requests
    )
    headroom, target_s = random.choice([1, 32, 64, 1 << 16]), random.choice([0.0, 0.0, 0.01])
    return _replace_scheduler(replace(schedule, requests=requests), kv_headroom=headroom, step_target_s=target_s)


def _make_crowded(random: Random, schedule: Schedule) -> Schedule:
    """Let all requests become long at the same time, so that a few of them would fill the stages."""
    workers = tuple(replace(w, capacity=9 << 5) for w in schedule.workers)
    requests = []
    for spec in schedule.requests:
        submit = spec.submit
        length = random.choice([60, 100, 150])
        params = msgspec.structs.replace(submit.params, max_tokens=length, min_tokens=0, ignore_eos=True)
        requests.append(
            replace(replace_fields(spec, prompt=submit.prompt[:70], params=params), at=random.uniform(2.0, 2.5))
        )
    crowded = replace(schedule, workers=workers, requests=tuple(requests))
    return _replace_scheduler(crowded, kv_headroom=random.choice([1, 32]), max_running=64)


def _draw_sharing(random: Random, schedule: Schedule) -> Schedule:
    """Draw the chunks that workers can share, and perhaps more sequences of one prompt than there is memory for."""
    if random.random() < NO_SHARING:
        return schedule
    units = random.choice([(32,), (64,), (32, 64), (32, 32, 0)])
    workers = tuple(replace(worker, share_unit=random.choice(units)) for worker in schedule.workers)
    requests = schedule.requests
    if random.random() < MANY_CONTINUATIONS:
        requests = tuple(
            replace_fields(spec, params=msgspec.structs.replace(spec.submit.params, n=random.choice([1, 4, 8])))
            for spec in requests
        )
    return replace(schedule, workers=workers, requests=requests)


def _draw_journal(random: Random, schedule: Schedule) -> Schedule:
    """Draw the journal, its speed, and how long ended requests stay in memory."""
    settings, pace = schedule.settings, schedule.pace
    has_journal = random.random() >= NO_JOURNAL
    retain_s = random.choice([1.0, 5.0, 60.0]) if has_journal else 60.0
    requests = replace(settings.requests, has_journal=has_journal, retain_s=retain_s)
    if random.random() < SLOW_DISK:
        pace = replace(pace, journal=(0.005, 0.3))
    return replace(schedule, settings=replace(settings, requests=requests), pace=pace)


def replace_fields(spec: ScheduledRequest, **fields: object) -> ScheduledRequest:
    return replace(spec, submit=msgspec.structs.replace(spec.submit, **fields))


def _replace_scheduler(schedule: Schedule, **fields: object) -> Schedule:
    scheduler = replace(schedule.settings.scheduler, **fields)  # type: ignore[arg-type]
    return replace(schedule, settings=replace(schedule.settings, scheduler=scheduler))


def _draw_weather(random: Random, schedule: Schedule) -> Schedule:
    """Draw bad weather, and logs that are too small."""
    weather, log_bytes = CALM, 1 << 20
    if random.random() < BAD_WEATHER:
        weather = Weather(
            late=random.choice([0.0, 0.01, 0.1]),
            jitter_s=random.choice([0.02, 0.1, 0.5]),
            twice=random.choice([0.0, 0.0, 0.02, 0.1]),
            overtaken=random.choice([0.0, 0.0, 0.1]),
        )
    if random.random() < SMALL_LOG:
        log_bytes = random.choice([0, 256, 1024, 4096])
    return replace(schedule, weather=weather, log_bytes=log_bytes)


def _lose_journal(random: Random, schedule: Schedule) -> Schedule:
    """Perhaps add a fault of the journal; from its own random numbers, so that the rest of a schedule doesn't depend on
    it."""
    if random.random() >= LOST_JOURNAL or not schedule.settings.requests.has_journal:
        return schedule
    kind, at = random.choice(JOURNAL_FAULT_KINDS), random.uniform(0.4, 4.5)
    lost = Fault(kind=kind, at=at, who=random.randrange(8), for_s=0.0, whom=random.randrange(8))
    return replace(schedule, faults=(*schedule.faults, lost))


def _draw_faults(random: Random) -> tuple[Fault, ...]:
    faults: list[Fault] = []
    for _ in range(random.choice([0, 1, 1, 1, 2, 2, 3, 4])):
        at = faults[-1].at if faults and random.random() < AT_ONCE else random.uniform(0.4, 4.5)
        faults.append(draw_fault(random, at))
    return tuple(faults)


def _add_readers(random: Random, schedule: Schedule) -> Schedule:
    """Detach some requests, and give some a second reader."""
    requests = []
    for spec in schedule.requests:
        after = random.uniform(0.0, 4.0) if random.random() < 0.6 else None
        requests.append(replace(replace_fields(spec, detached=random.random() < 0.4), read_after=after))
    return replace(schedule, requests=tuple(requests))


def _freeze_client(random: Random, schedule: Schedule) -> Schedule:
    """Perhaps let a client stand still, longer than it would wait for a broker."""
    if random.random() >= FROZEN_CLIENT:
        return schedule
    fault = Fault("client_freeze", random.uniform(0.4, 4.5), random.randrange(8), random.uniform(*FROZEN_S))
    return replace(schedule, faults=(*schedule.faults, fault))


def _change_journal(random: Random, schedule: Schedule) -> Schedule:
    if random.random() >= CHANGED_JOURNAL:
        return schedule
    fault = replace(draw_fault(random, random.uniform(0.8, 4.5)), kind=random.choice(JOURNAL_FAULTS))
    return replace(schedule, faults=(*schedule.faults, fault))


def draw_fault(random: Random, at: float) -> Fault:
    when = random.choice(("before", "after"))
    return Fault(
        kind=random.choice(FAULT_KINDS),
        at=at,
        who=random.randrange(8),
        for_s=random.choice([0.1, 0.5, 1.5, 3.0]) * random.random(),
        whom=random.randrange(8),
        point=(when, random.choice(ORDERS + ANSWERS)),
        broker_point=(when, random.choice(BROKER_POINTS)),
        count=random.choice([1, 1, 2, 5, 20]),
    )
