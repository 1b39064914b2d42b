"""Variations added to a schedule, each from random numbers of its own, so that the rest of a seed's schedule doesn't
depend on it.

Some schedules are far larger than the others, some queues are short, and some callers ask for the route of each token.
Requests are cancelled by other clients, clients die for good, listeners close, reads and computations fail, devices
break, and requests make steps fail. Most swarms check keys, and some keys are revoked. Copies of keys and values lag,
are lost, evicted or damaged, and die with their owners. In half of the schedules, tokens are proposed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import get_args

import msgspec
from msgspec.structs import replace as replace_params

from swarm.broker.planner.standby import StandbyPolicy
from swarm.params import SamplingParams
from swarm.sim.schedules.draw import (
    ADAPTER_FAULTS,
    KV_FAULTS,
    OTHER_FAULTS,
    SLEEP_FAULTS,
    STEP_FAULTS,
    draw_fault,
    draw_request,
    make_schedule,
    replace_fields,
)
from swarm.sim.schedules.schedule import (
    MIB,
    UNLIKE_SOURCE,
    AdapterOrder,
    DraftBehaviour,
    Fault,
    FaultKind,
    Guess,
    KvConditions,
    LookupSpec,
    Misreport,
    Schedule,
    ScheduledRequest,
    SpeculationConditions,
    WorkerSpec,
)
from swarm.testing_images import FAKE_VISION, fake_image

ADAPTER_POINTS = ("SetAdapters", "AdaptersSet")  # messages about adapters, at which processes die
LATEST_ADAPTER_ORDER = 5.0  # time after which an operator drops and loads nothing again
UNLIKE_FILES = 0.1  # share of loads that fail, because hosts have different files
LOADED_LAST = 0.6  # share of names that stand for an adapter at the end
WAITING_FOR_ADAPTER = 0.8  # share of requests that wait until their adapter is loaded
LARGE = 0.03  # share of schedules with many more requests and faults than others
MOST_REQUESTS, MOST_FAULTS = 20, 12
SHORT_QUEUE = 0.08  # share of schedules with a queue so short that requests are rejected for a while
QUEUES = (4, 6)  # sequences: room for the three continuations of one tenant
HOPS = 0.15  # share of schedules whose callers ask for the route of each token
REVOKED = 0.08  # share of schedules in which other clients cancel requests
RECALLS = 0.5  # share of schedules whose second readers first ask for the submitted request
NO_KEYS = 0.1  # share of schedules whose listeners check no keys
HIDDEN = 0.2  # share of schedules with keys in which some workers can only connect outwards
KEY_REVOKED = 0.1  # share of schedules with keys in which workers' keys are revoked
LATE_DRAWS = 0.2  # share of schedules in which the last stage delays draws
LOOKED_UP = 0.3  # share of schedules in which a client looks answers up while others read them
KEPT = 0.15  # share of schedules in which some requests are kept when their readers leave
BROKER_SLEEPS = 0.04  # share of schedules in which the broker is paused for long
SLEEP_S = (31.0, 40.0)  # longer than unanswered requests wait for the broker, shorter than answered ones do
MANY_COPIES = 0.2  # share of schedules in which workers share the layers, and most sequences grow long
UNLIKE = 0.15  # share of schedules in which the kernels of some workers compute other bits
CHANGING_BITS = 0.5  # of the schedules with disks, share in which one worker computes other bits, and some die
NO_COPIES = 0.2  # share of schedules in which workers hold no copies of keys and values
KV_OFTEN = 0.08  # share of schedules with a fault of copies, for each kind
KV_POINTS = ("SendKv", "ReceiveKv", "KvArrived", "KvHeld", "Activate")  # a worker dies before or after one of these
LONG_STATES = 0.5  # of the schedules of a recurrent model, share in which workers share the layers of long sequences
SPECULATES = 0.5  # share of schedules in which tokens are proposed
LIMITED = 0.3  # of them, share in which the broker limits proposals by what was accepted before
MISREPORTED = 0.3  # of them, share in which the last stage misreports what it accepted
GUESSES: tuple[tuple[Guess, ...], ...] = (
    ("right",),
    ("right", "right", "right", "wrong"),
    ("partly", "partly", "right", "nothing"),
    ("right", "wrong", "partly", "nothing", "too_long", "foreign"),
)
MISREPORTS: tuple[Misreport, ...] = ("accepts", "counts", "repeats", "forces")
ONLY_DRAFTS = 0.6  # of the schedules with a draft model, share in which nothing else guesses
DRAFTS: tuple[tuple[DraftBehaviour, ...], ...] = (
    ("right",),
    ("right", "partly", "wrong"),
    ("right", "right", "right", "late", "silent", "dies"),
    ("right", "partly", "behind", "drops", "loses"),
    get_args(DraftBehaviour),
)
STRUCK = 0.7  # of the schedules with images, share in which workers die in the middle of answers
SEEING = 0.75  # of the requests to a model that reads images, share with some
IMAGE_SHAPES = ((1, 1), (2, 3), (4, 4), (4, 4), (5, 8))  # rows and columns
TURNED = 0.1  # share of images whose rows are columns: pixels of one colour are the same, the image is not
MOST_TEXT = 70  # tokens behind images
IMAGE_ROOMS = (16, 40, 64, 1024)  # tokens of images whose features first stages keep
OTHER_ANSWERS = 0.1  # share of schedules in which some requests ask for vectors or log probabilities of their prompt
OFTEN = 0.06  # share of schedules with a fault of one of the other kinds, for each kind


def make_full_schedule(seed: int, *, faults: bool = True) -> Schedule:
    """Return the whole schedule of a seed, always the same."""
    schedule = make_schedule(seed, faults=faults)
    keys = Random(f"keys {seed}")
    schedule = replace(schedule, keys=keys.random() >= NO_KEYS)
    variations: list[Callable[[Random, Schedule], Schedule]] = [_shorten_queue, _ask_for_hops, _use_recalls]
    if faults:
        variations += [_enlarge, _revoke_requests, *(_add_fault(kind) for kind in OTHER_FAULTS)]
    variations.append(_delay_draws)
    if faults:
        variations += [_add_fault(kind) for kind in STEP_FAULTS]
        variations.append(_pause_broker)
    for number, variation in enumerate(variations):
        schedule = variation(Random(f"habit {number} {seed}"), schedule)
    schedule = _add_lookups(Random(f"looks {seed}"), schedule)
    schedule = _keep_requests(Random(f"kept {seed}"), schedule)
    if schedule.keys:
        schedule = _hide_workers(Random(f"hidden {seed}"), schedule)
    if faults and schedule.keys:
        schedule = _revoke_keys(keys, schedule)
    schedule = _draw_copies(Random(f"copies {seed}"), schedule, faults=faults)
    for kind in KV_FAULTS if faults else ():
        schedule = _add_kv_fault(kind, Random(f"{kind} {seed}"), schedule)
    schedule = _draw_bits(Random(f"bits {seed}"), schedule)
    schedule = _draw_speculation(Random(f"speculation {seed}"), schedule, faults=faults)
    return add_answers(seed, schedule) if Random(f"answers {seed}").random() < OTHER_ANSWERS else schedule


def add_answers(seed: int, schedule: Schedule) -> Schedule:
    """Return the schedule with requests for vectors and for log probabilities of prompts beside the others, some of
    them with a common beginning."""
    random = Random(f"vectors {seed}")
    beginning = schedule.requests[0].submit.prompt[:64]
    requests = []
    for number in range(random.randint(2, 4)):
        spec = draw_request(random, len(schedule.requests) + number, len(schedule.clients))
        prompt = tuple(random.randrange(97) for _ in range(random.choice([1, 31, 32, 33, 100, 200])))
        prompt = beginning + prompt if random.random() < 0.5 else prompt
        params = random.choice(
            [
                SamplingParams(vector=random.choice(["last", "mean"])),
                SamplingParams(prompt_logprobs=random.choice([0, 2]), max_tokens=0),
                replace_params(spec.submit.params, prompt_logprobs=random.choice([0, 2]), max_tokens=2),
            ]
        )
        requests.append(replace(replace_fields(spec, prompt=prompt, params=params), stops={}))
    return replace(schedule, requests=(*schedule.requests, *requests))


def add_drafts(seed: int, schedule: Schedule) -> Schedule:
    """Return the schedule of a broker with a draft model, which guesses alone or beside the other proposer."""
    random = Random(f"drafts {seed}")
    conditions = schedule.speculation or SpeculationConditions(("nothing",))
    if random.random() < ONLY_DRAFTS:
        conditions = replace(conditions, guesses=("nothing",))
    conditions = replace(conditions, drafts=random.choice(DRAFTS))
    return replace(schedule, speculation=conditions, settings=replace(schedule.settings, has_draft=True))


def add_disks(seed: int, schedule: Schedule, *, faults: bool = True) -> Schedule:
    """Return the schedule of a swarm whose workers write to disk: long sequences run, and others begin like them. In
    many, the bits change from plan to plan meanwhile."""
    random = Random(f"disks {seed}")
    is_changing = random.random() < CHANGING_BITS
    schedule = _make_long(random, schedule)
    beginning = tuple(random.randrange(97) for _ in range(random.choice([64, 96, 160])))
    requests = tuple(
        replace_fields(spec, prompt=beginning + spec.submit.prompt[:40]) if random.random() < 0.7 else spec
        for spec in schedule.requests
    )
    if not is_changing:
        late = tuple(replace(spec, at=spec.at + random.choice((0.0, 1.0, 3.0))) for spec in requests)
        return replace(schedule, requests=late, machines=replace(schedule.machines, unlike=()))
    machines = schedule.machines
    if not machines.together:
        machines = replace(machines, unlike=(random.choice(schedule.workers).name,))
    moments = [random.uniform(0.8, 4.5) for _ in range(random.choice([2, 3, 4]) if faults else 0)]
    crashes = tuple(replace(draw_fault(random, at), kind="crash") for at in moments)
    return replace(schedule, requests=requests, machines=machines, faults=(*schedule.faults, *crashes))


def add_states(seed: int, schedule: Schedule) -> Schedule:
    """Return the schedule of a recurrent model: its layers keep states, which can't be rolled back."""
    random = Random(f"states {seed}")
    schedule = replace(schedule, state_stride=random.choice([32, 64, 64, 128]))
    return _make_long(random, schedule) if random.random() < LONG_STATES else schedule


def add_adapters(seed: int, schedule: Schedule, *, faults: bool = True) -> Schedule:
    """Return the schedule of a swarm whose operator loads and drops adapters, and whose callers name them: one name
    stands for several contents in turn, prompts begin alike with other adapters, and processes die in mid-load."""
    random = Random(f"adapters {seed}")
    names = ("red", "blue", "green")[: random.randint(1, 3)]
    orders = []
    for name in names:
        at, version = random.uniform(0.1, 1.2), 0
        while at < LATEST_ADAPTER_ORDER:
            version += 1
            source = UNLIKE_SOURCE if random.random() < UNLIKE_FILES else f"/{name}-{version % 3}"
            orders.append(AdapterOrder(at, "load", name, source))
            at += random.choice([0.2, 1.0, 3.0]) * random.random()
            orders.append(AdapterOrder(at, "drop", name))
            at += random.choice([0.01, 0.5, 2.0]) * random.random()
        if random.random() < LOADED_LAST:
            orders.append(AdapterOrder(at, "load", name, f"/{name}-last"))
    requests = []
    for spec in schedule.requests:
        adapter = random.choice([*names, *names, ""])
        params = replace_params(spec.submit.params, adapter=adapter)
        waits = random.random() < WAITING_FOR_ADAPTER
        requests.append(replace(replace_fields(spec, params=params), waits_for_adapter=waits))
    points = [(when, kind) for when in ("before", "after") for kind in ADAPTER_POINTS]
    blows = []
    for _ in range(random.choice([0, 1, 2, 3]) if faults else 0):
        fault = draw_fault(random, random.uniform(0.2, 4.5))
        broker_point = random.choice([*points, *((when, "WriteAdapters") for when in ("before", "after"))])
        kind = random.choice((*ADAPTER_FAULTS, "crash_at", "broker_crash_at"))
        blows.append(replace(fault, kind=kind, point=random.choice(points), broker_point=broker_point))
    return replace(schedule, adapters=tuple(orders), requests=tuple(requests), faults=(*schedule.faults, *blows))


def add_images(seed: int, schedule: Schedule, *, faults: bool = True) -> Schedule:
    """Return the schedule of a model that reads images: many prompts begin with the same text and images of the same
    sizes, of which some are the same images. In half of them, workers die in the middle of answers."""
    random = Random(f"images {seed}")
    layouts = [_draw_layout(random) for _ in range(random.randint(1, 2))]
    num_colours = random.choice([1, 2, 2, 3])
    requests = tuple(
        _show_images(random, spec, random.choice(layouts), num_colours) if random.random() < SEEING else spec
        for spec in schedule.requests
    )
    schedule = replace(schedule, requests=requests, image_room=random.choice(IMAGE_ROOMS))
    blows = Random(f"images struck {seed}")
    # Long answers one after the other would take longer than a schedule may.
    if faults and schedule.settings.scheduler.max_running > 1 and blows.random() < STRUCK:
        schedule = _strike(blows, _spread(blows, schedule, blows.randint(3, 4)))
    caps = {name: max(cap, FAKE_VISION.num_layers) for name, cap in schedule.settings.plan.rules.caps.items()}
    return _replace_rules(schedule, caps=caps)


def _strike(random: Random, schedule: Schedule) -> Schedule:
    """Let workers die that send steps to others in the middle of long answers. The others keep their layers, and those
    of the dead ones are rebuilt: if the first stage is among them, tokens of images are replayed."""
    params = [replace_params(spec.submit.params, max_tokens=60, min_tokens=60) for spec in schedule.requests]
    requests = tuple(
        replace(replace_fields(spec, params=longer), at=random.uniform(0.8, 3.0), leaves_after=None)
        for spec, longer in zip(schedule.requests, params, strict=True)
    )
    crashes = []
    for _ in range(random.randint(1, 2)):
        fault = draw_fault(random, random.choice(requests).at + random.uniform(0.1, 0.6))
        crashes.append(replace(fault, kind="crash_at", point=(fault.point[0], "Step")))
    return replace(schedule, requests=requests, faults=(*schedule.faults, *crashes))


def _draw_layout(random: Random) -> tuple[tuple[tuple[int, ...], tuple[int, int]], ...]:
    """Draw the common beginning of some prompts: texts, each with rows and columns of the image behind it."""
    texts = [random.choice([0, 1, 5, 31, 33]) for _ in range(random.choice([1, 1, 2, 3]))]
    return tuple((tuple(random.randrange(97) for _ in range(text)), random.choice(IMAGE_SHAPES)) for text in texts)


def _show_images(
    random: Random,
    spec: ScheduledRequest,
    layout: tuple[tuple[tuple[int, ...], tuple[int, int]], ...],
    num_colours: int,
) -> ScheduledRequest:
    """Return the request with images before its prompt."""
    prompt: tuple[int, ...] = ()
    images, pixels = [], []
    for text, shape in layout:
        prompt += text
        shape = shape if random.random() >= TURNED else shape[::-1]  # noqa: PLW2901 (the same number of tokens)
        image, its_pixels = fake_image(len(prompt), *shape, random.randrange(num_colours))
        images.append(image)
        pixels.append(its_pixels)
        prompt += (FAKE_VISION.token,) * image.num_tokens
    prompt += spec.submit.prompt[:MOST_TEXT]
    params = replace_params(spec.submit.params, images=tuple(images))
    return replace_fields(spec, prompt=prompt, params=params, pixels=tuple(pixels))


def _draw_bits(random: Random, schedule: Schedule) -> Schedule:
    """Have the kernels of some workers compute other bits, so that keys and values are not copied to the others."""
    if random.random() >= UNLIKE or schedule.machines.together:
        return schedule
    unlike = tuple(spec.name for spec in schedule.workers if random.random() < 0.5)
    return replace(schedule, machines=replace(schedule.machines, unlike=unlike))


def _draw_speculation(random: Random, schedule: Schedule, *, faults: bool) -> Schedule:
    """Draw whether tokens are proposed, how right they are, and how the last stage misreports what it accepted."""
    if random.random() >= SPECULATES:
        return schedule
    guesses, is_honest = random.choice(GUESSES), random.random() >= MISREPORTED or not faults
    misreported = () if is_honest else random.choice([MISREPORTS, (random.choice(MISREPORTS),)])
    share = 0.0 if is_honest else random.choice([0.05, 0.3, 1.0])
    is_limited = random.random() < LIMITED
    return replace(schedule, speculation=SpeculationConditions(guesses, misreported, share, is_limited))


def _draw_copies(random: Random, schedule: Schedule, *, faults: bool) -> Schedule:
    """Draw who holds copies of keys and values, how often a part may be sent, and the memory for copies."""
    policy: StandbyPolicy = (
        "none" if random.random() < NO_COPIES else random.choice(("neighbours", "neighbours", "all"))
    )
    turn_s = random.choice([(0.001, 0.01), (0.005, 0.05), (0.02, 0.3)])
    conditions = KvConditions(turn_s, random.choice([1 << 20, 1 << 20, 1 << 20, 20_000, 2_000, 100]))
    schedule = _replace_rules(replace(schedule, kv=conditions), standby_kv=policy)
    if random.random() >= MANY_COPIES:
        return schedule
    schedule = _make_long(random, schedule)
    for _ in range(random.choice([0, 1, 1, 2]) if faults else 0):
        fault = replace(draw_fault(random, random.uniform(0.8, 3.0)), kind="kv_owner", count=random.randint(1, 30))
        schedule = replace(schedule, faults=(*schedule.faults, fault))
    return schedule


def _replace_rules(schedule: Schedule, **fields: object) -> Schedule:
    plan = schedule.settings.plan
    settings = replace(schedule.settings, plan=replace(plan, rules=replace(plan.rules, **fields)))  # type: ignore[arg-type]
    return replace(schedule, settings=settings)


def _make_long(random: Random, schedule: Schedule) -> Schedule:
    """Let several workers share the layers, with memory for each other's, and sequences grow over many blocks."""
    schedule = _spread(random, schedule, random.randint(2, 4))
    requests = []
    for spec in schedule.requests:
        prompt = tuple(random.randrange(97) for _ in range(random.choice([20, 64, 100, 180])))
        length = random.choice([40, 80, 150])
        params = msgspec.structs.replace(spec.submit.params, max_tokens=length, min_tokens=0, ignore_eos=True)
        later = replace(replace_fields(spec, prompt=prompt, params=params), at=random.uniform(0.8, 3.0))
        requests.append(later)
    return replace(schedule, requests=tuple(requests))


def _spread(random: Random, schedule: Schedule, num_workers: int) -> Schedule:
    """Let several workers share the layers, with memory for each other's."""
    num_layers, names = schedule.num_layers, [f"w{number}" for number in range(num_workers)]
    memory_bytes = (64 + num_layers + 4) * MIB
    workers = tuple(
        WorkerSpec(name, 0.2 * random.random(), memory_bytes, random.choice([1 << 10, 1 << 14])) for name in names
    )
    return _replace_rules(replace(schedule, workers=workers), caps=dict.fromkeys(names, max(1, (num_layers + 1) // 2)))


def _add_kv_fault(kind: FaultKind, random: Random, schedule: Schedule) -> Schedule:
    if random.random() >= KV_OFTEN:
        return schedule
    point = random.choice(("before", "after")), random.choice(KV_POINTS)
    fault = replace(draw_fault(random, random.uniform(0.8, 4.5)), kind=kind, point=point)
    return replace(schedule, faults=(*schedule.faults, fault))


def _shorten_queue(random: Random, schedule: Schedule) -> Schedule:
    """Let one sequence run at a time, with a short queue."""
    if random.random() >= SHORT_QUEUE or any(spec.submit.params.n > 3 for spec in schedule.requests):
        return schedule
    requests = replace(schedule.settings.requests, max_queue=random.choice(QUEUES))
    scheduler = replace(schedule.settings.scheduler, max_running=1)
    return replace(schedule, settings=replace(schedule.settings, requests=requests, scheduler=scheduler))


def _delay_draws(random: Random, schedule: Schedule) -> Schedule:
    """Have the last stage delay draws, as it does while grammars are being compiled."""
    if random.random() >= LATE_DRAWS:
        return schedule
    return replace(schedule, put_off_every=random.choice([2, 3, 7, 20]))


def _add_lookups(random: Random, schedule: Schedule) -> Schedule:
    """Have another client look answers up, while they come and after their ends."""
    if random.random() >= LOOKED_UP:
        return schedule
    looks: list[LookupSpec] = []
    for _ in range(random.randint(3, 25)):
        at = looks[-1].at if looks and random.random() < 0.3 else random.uniform(0.4, 6.0)
        reads_s = random.uniform(0.0, 1.0) if random.random() < 0.1 else None
        looks.append(
            LookupSpec(at, random.randrange(1 << 20), random.choice([1, 1, 2, 3, 6]), random.random() < 0.2, reads_s)
        )
    return replace(schedule, looks=tuple(looks))


def _keep_requests(random: Random, schedule: Schedule) -> Schedule:
    """Have some requests kept for a while when their readers leave; half of them are left."""
    if random.random() >= KEPT:
        return schedule
    requests = []
    for spec in schedule.requests:
        if random.random() < 0.5 and not spec.submit.detached:
            spec = replace_fields(spec, keep_s=random.choice([0.5, 2.0, 5.0, 40.0]))  # noqa: PLW2901 (the same, but kept)
            if random.random() < 0.5:
                spec = replace(spec, leaves_after=random.uniform(0.0, 2.0))  # noqa: PLW2901
        requests.append(spec)
    return replace(schedule, requests=tuple(requests))


def _pause_broker(random: Random, schedule: Schedule) -> Schedule:
    if random.random() >= BROKER_SLEEPS:
        return schedule
    fault = draw_fault(random, random.uniform(0.4, 4.5))
    asleep = replace(fault, kind=random.choice(SLEEP_FAULTS), for_s=random.uniform(*SLEEP_S))
    return replace(schedule, faults=(*schedule.faults, asleep))


def _ask_for_hops(random: Random, schedule: Schedule) -> Schedule:
    if random.random() >= HOPS:
        return schedule
    requests = tuple(replace_fields(spec, hops=random.random() < 0.5) for spec in schedule.requests)
    return replace(schedule, requests=requests)


def _use_recalls(random: Random, schedule: Schedule) -> Schedule:
    return replace(schedule, recalls=random.random() < RECALLS)


def _enlarge(random: Random, schedule: Schedule) -> Schedule:
    if random.random() >= LARGE:
        return schedule
    num_requests, clients = len(schedule.requests), len(schedule.clients)
    requests = [
        draw_request(random, number, clients) for number in range(num_requests, random.randint(9, MOST_REQUESTS))
    ]
    num_faults = random.randint(5, MOST_FAULTS) - len(schedule.faults)
    faults = [draw_fault(random, random.uniform(0.4, 4.5)) for _ in range(num_faults)]
    return replace(schedule, requests=(*schedule.requests, *requests), faults=(*schedule.faults, *faults))


def _revoke_requests(random: Random, schedule: Schedule) -> Schedule:
    if random.random() >= REVOKED:
        return schedule
    requests = tuple(
        replace(spec, revoked_after=random.uniform(0.0, 2.0)) if random.random() < 0.4 else spec
        for spec in schedule.requests
    )
    return replace(schedule, requests=requests)


def _hide_workers(random: Random, schedule: Schedule) -> Schedule:
    if random.random() >= HIDDEN:
        return schedule
    hidden = tuple(spec.name for spec in schedule.workers if random.random() < 0.6)
    return replace(schedule, hidden=hidden, elsewhere=tuple(name for name in hidden if random.random() < 0.5))


def _revoke_keys(random: Random, schedule: Schedule) -> Schedule:
    if random.random() >= KEY_REVOKED:
        return schedule
    moments = [random.uniform(0.4, 4.5) for _ in range(random.choice([1, 1, 2]))]
    faults = tuple(replace(draw_fault(random, at), kind="key_revoked") for at in moments)
    return replace(schedule, faults=(*schedule.faults, *faults))


def _add_fault(kind: FaultKind) -> Callable[[Random, Schedule], Schedule]:
    def variation(random: Random, schedule: Schedule) -> Schedule:
        if random.random() >= OFTEN:
            return schedule
        fault: Fault = replace(draw_fault(random, random.uniform(0.4, 4.5)), kind=kind)
        if kind == "client_dies":
            schedule = _detach_requests(random, schedule)
        return replace(schedule, faults=(*schedule.faults, fault))

    return variation


def _detach_requests(random: Random, schedule: Schedule) -> Schedule:
    """Detach half of the requests of a schedule in which a client dies; without a journal none can be detached."""
    if not schedule.settings.requests.has_journal:
        return schedule
    requests = tuple(
        replace_fields(spec, detached=spec.submit.detached or random.random() < 0.5) for spec in schedule.requests
    )
    return replace(schedule, requests=requests)
