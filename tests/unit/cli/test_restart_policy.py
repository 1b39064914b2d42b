"""The supervisor's decisions: events and times go in, exact actions come out."""

from __future__ import annotations

import pytest

from swarm.cli.up.joins import JOIN_TIMEOUT_S as JOIN_PATIENCE_S
from swarm.cli.up.supervisor import (
    EX_CONFIG,
    EX_UNSERVED,
    FIRST_DELAY_S,
    GATEWAY,
    GATEWAY_AFTER_S,
    GRACE_S,
    HEALTHY_S,
    MAX_DELAY_S,
    MAX_WORKERS,
    REAP_S,
    AnswerRequest,
    ChildExited,
    ChildNotStarted,
    EndSupervisor,
    KillChild,
    ModelRefused,
    ShowGivenUp,
    ShowLeft,
    ShowRestart,
    StartChild,
    StopRequested,
    Supervisor,
    SupervisorStarted,
    SupervisorTick,
    SwarmServing,
    TerminateChild,
    WorkersJoined,
    WorkersRequested,
    describe_exit,
)


def begun(num_workers: int) -> Supervisor:
    supervisor = Supervisor()
    supervisor.handle(SupervisorStarted(num_workers), 0.0)
    return supervisor


def test_begins_with_the_broker_and_then_the_workers() -> None:
    """The broker is first, workers are numbered from w0, and nothing else is due."""
    supervisor = Supervisor()
    assert supervisor.handle(SupervisorStarted(2), 0.0) == [StartChild("broker"), StartChild("w0"), StartChild("w1")]
    assert supervisor.wake_at() is None


def test_no_workers_is_a_broker_alone() -> None:
    """With no workers the broker is started and waits; that nobody serves is no reason to end."""
    supervisor = Supervisor()
    assert supervisor.handle(SupervisorStarted(0), 0.0) == [StartChild("broker")]
    assert supervisor.handle(SupervisorTick(), 1000.0) == []


def test_a_further_swarm_is_no_worker() -> None:
    """It is restarted whatever its exit code, is given up alone, and does not keep a swarm without workers."""
    supervisor = Supervisor()
    on_gpus = Supervisor().handle(SupervisorStarted(2, device="cuda", gpus=("cuda:0", "cuda:1")), 0.0)
    assert on_gpus[1:] == [StartChild("gpu0", device="cuda:0"), StartChild("gpu1", device="cuda:1")]
    actions = supervisor.handle(SupervisorStarted(1, swarms=("swarm-b", "swarm-c")), 0.0)
    assert actions == [StartChild("broker"), StartChild("w0"), StartChild("swarm-b"), StartChild("swarm-c")]
    assert supervisor.workers() == ("w0",)
    assert supervisor.handle(ChildExited("swarm-b", 0), 1.0) == [ShowRestart("swarm-b", "ended with code 0", 0.05)]
    assert supervisor.handle(ChildExited("swarm-c", EX_CONFIG, "no model"), 1.0) == [ShowGivenUp("swarm-c", "no model")]
    ended = supervisor.handle(ChildExited("w0", EX_CONFIG, "no model"), 1.0)
    assert ended[0] == ShowGivenUp("w0", "no model")
    assert TerminateChild("broker") in ended


def test_delay_doubles_up_to_a_limit() -> None:
    """Each death in a row doubles the wait, from the first delay to the longest."""
    supervisor, now, delays = begun(1), 0.0, []
    for _ in range(10):
        (say,) = supervisor.handle(ChildExited("w0", -9), now)
        assert isinstance(say, ShowRestart)
        delays.append(say.delay_s)
        # a moment too early nothing happens, on time the child comes back
        now = supervisor.wake_at() or 0.0
        assert supervisor.handle(SupervisorTick(), now - 0.001) == []
        assert supervisor.handle(SupervisorTick(), now) == [StartChild("w0")]
    assert delays == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert (delays[0], delays[-1]) == (FIRST_DELAY_S, MAX_DELAY_S)


def test_a_healthy_life_forgives() -> None:
    """After a life of HEALTHY_S the next delay is the first one again; a little less is not enough."""
    supervisor = begun(1)
    supervisor.handle(ChildExited("w0", 1), 0.0)
    supervisor.handle(SupervisorTick(), 0.05)
    assert supervisor.handle(ChildExited("w0", 1), 0.05 + HEALTHY_S - 0.01) == [
        ShowRestart("w0", "ended with code 1", 0.1)
    ]
    now = supervisor.wake_at() or 0.0
    supervisor.handle(SupervisorTick(), now)
    assert supervisor.handle(ChildExited("w0", 1), now + HEALTHY_S + 0.01) == [
        ShowRestart("w0", "ended with code 1", 0.05)
    ]


def test_each_child_has_a_count_of_its_own() -> None:
    """One worker's failures don't delay another's restart, and ticks start only what is due."""
    supervisor = begun(2)
    supervisor.handle(ChildExited("w0", 1), 0.0)
    supervisor.handle(SupervisorTick(), 0.05)
    supervisor.handle(ChildExited("w0", 1), 0.3)  # due at 0.4
    assert supervisor.handle(ChildExited("w1", 1), 0.37) == [ShowRestart("w1", "ended with code 1", 0.05)]
    assert supervisor.handle(SupervisorTick(), 0.4) == [StartChild("w0")]
    assert supervisor.handle(SupervisorTick(), 0.43) == [StartChild("w1")]


def test_a_worker_may_leave_and_the_broker_may_not() -> None:
    """Exit code 0: a worker stays away, also later; the broker comes back."""
    supervisor = begun(2)
    assert supervisor.handle(ChildExited("w1", 0), 1.0) == [ShowLeft("w1")]
    assert supervisor.handle(ChildExited("broker", 0), 1.0) == [ShowRestart("broker", "ended with code 0", 0.05)]
    assert supervisor.handle(SupervisorTick(), 100.0) == [StartChild("broker")]
    assert supervisor.workers() == ("w0",)


@pytest.mark.parametrize(("code", "words"), [(143, "ended after SIGTERM"), (130, "ended after SIGINT")])
def test_a_worker_that_a_signal_ended_comes_back(code: int, words: str) -> None:
    """Somebody ended it by hand, however orderly it went: nobody told the swarm to do without it. Unless all stops."""
    supervisor = begun(1)
    assert supervisor.handle(ChildExited("w0", code), 1.0) == [ShowRestart("w0", words, 0.05)]
    assert supervisor.handle(SupervisorTick(), 1.25) == [StartChild("w0")]
    supervisor.handle(StopRequested(), 2.0)
    assert supervisor.handle(ChildExited("w0", code), 2.1) == []


def test_a_worker_that_cannot_work_is_given_up() -> None:
    """EX_CONFIG: the reason is told, the worker is not started again, the others go on."""
    supervisor = begun(2)
    assert supervisor.handle(ChildExited("w0", EX_CONFIG, "no such shard"), 1.0) == [ShowGivenUp("w0", "no such shard")]
    assert supervisor.wake_at() is None
    assert supervisor.running() == ("broker", "w1")


def test_a_swarm_without_a_worker_that_works_ends() -> None:
    """If the last worker is given up before anything was served, all ends with that worker's reason."""
    supervisor = begun(2)
    supervisor.handle(ChildExited("w0", EX_CONFIG, "no such shard"), 1.0)
    assert supervisor.handle(ChildExited("w1", EX_CONFIG, "no such shard"), 1.0) == [
        ShowGivenUp("w1", "no such shard"),
        TerminateChild("broker"),
    ]
    assert supervisor.handle(ChildExited("broker", 0), 1.1) == [EndSupervisor("no such shard")]


@pytest.mark.parametrize("refusal", [ModelRefused("no attention"), ChildExited("w0", EX_UNSERVED, "no attention")])
def test_a_model_that_no_worker_can_serve_ends_all_with_one_error(refusal: ModelRefused | ChildExited) -> None:
    """The other workers would report the same: they are ended at once, and nothing else is shown."""
    supervisor = begun(2)
    actions = supervisor.handle(refusal, 1.0)
    left = ["broker", "w0", "w1"] if isinstance(refusal, ModelRefused) else ["broker", "w1"]
    assert actions == [TerminateChild(name) for name in reversed(left)]
    assert supervisor.handle(ModelRefused("no attention"), 1.05) == []
    ended = [action for name in left for action in supervisor.handle(ChildExited(name, EX_UNSERVED, "no"), 1.1)]
    assert ended == [EndSupervisor("no attention")]


def test_a_swarm_that_served_outlives_a_model_that_is_refused_later() -> None:
    """Its files were changed: the workers that have loaded them go on."""
    supervisor = begun(2)
    supervisor.handle(SwarmServing(), 1.0)
    assert supervisor.handle(ModelRefused("no attention"), 2.0) == []
    assert supervisor.handle(ChildExited("w0", EX_UNSERVED, "no"), 2.0) == [ShowGivenUp("w0", "no")]
    assert supervisor.running() == ("broker", "w1")


def test_a_swarm_that_served_goes_on_without_workers() -> None:
    """Once it served, workers from elsewhere may bring it back: the broker stays."""
    supervisor = begun(1)
    supervisor.handle(SwarmServing(), 1.0)
    assert supervisor.handle(ChildExited("w0", EX_CONFIG, "refused"), 2.0) == [ShowGivenUp("w0", "refused")]
    assert not supervisor.is_stopping


def test_a_broker_that_cannot_work_ends_all() -> None:
    """The broker's EX_CONFIG ends the workers, and its reason is the end's."""
    supervisor = begun(2)
    assert supervisor.handle(ChildExited("broker", EX_CONFIG, "the port is taken"), 0.5) == [
        TerminateChild("w1"),
        TerminateChild("w0"),
    ]
    supervisor.handle(ChildExited("w1", 0), 0.6)
    assert supervisor.handle(ChildExited("w0", -15), 0.7) == [EndSupervisor("the port is taken")]


def test_what_the_machine_cannot_start_is_tried_again() -> None:
    """No process to be had (out of memory, too many processes) is a failure like others."""
    supervisor = begun(1)
    assert supervisor.handle(ChildNotStarted("w0", "no memory"), 0.0) == [
        ShowRestart("w0", "could not start: no memory", 0.05)
    ]
    assert supervisor.handle(SupervisorTick(), 0.05) == [StartChild("w0")]


def test_stop_asks_all_and_ends_with_the_last() -> None:
    """Everybody is asked at once, the broker last; the end comes with the last exit, without an error."""
    supervisor = begun(2)
    assert supervisor.handle(StopRequested(), 1.0) == [
        TerminateChild("w1"),
        TerminateChild("w0"),
        TerminateChild("broker"),
    ]
    assert supervisor.handle(ChildExited("w0", 0), 1.1) == []
    assert supervisor.handle(ChildExited("broker", EX_CONFIG), 1.2) == []  # while stopping, no code means anything
    assert supervisor.handle(ChildExited("w1", -9), 1.3) == [EndSupervisor(None)]
    assert supervisor.wake_at() is None


def test_stop_kills_after_the_grace_and_gives_up_on_the_kernel() -> None:
    """Who does not go within GRACE_S is killed; who still does not go is named, and the end comes all the same."""
    supervisor = begun(1)
    supervisor.handle(StopRequested(), 1.0)
    supervisor.handle(ChildExited("broker", 0), 1.1)
    assert supervisor.wake_at() == 1.0 + GRACE_S
    assert supervisor.handle(SupervisorTick(), 1.0 + GRACE_S) == [KillChild("w0")]
    assert supervisor.wake_at() == 1.0 + GRACE_S + REAP_S
    (end,) = supervisor.handle(SupervisorTick(), 1.0 + GRACE_S + REAP_S)
    assert end == EndSupervisor("could not end w0: the kernel did not end them")


def test_second_stop_kills_at_once_and_a_third_changes_nothing() -> None:
    """An impatient user gets what they ask for, once."""
    supervisor = begun(1)
    supervisor.handle(StopRequested(), 1.0)
    assert supervisor.handle(StopRequested(), 1.1) == [KillChild("w0"), KillChild("broker")]
    assert supervisor.handle(StopRequested(), 1.2) == []
    supervisor.handle(ChildExited("w0", -9), 1.3)
    assert supervisor.handle(ChildExited("broker", -9), 1.3) == [EndSupervisor(None)]


def test_stop_during_backoff_starts_nobody() -> None:
    """A child that waits for its restart is not started any more, and with nobody else alive the end is immediate."""
    supervisor = begun(1)
    supervisor.handle(ChildExited("w0", 1), 1.0)
    supervisor.handle(ChildExited("broker", 1), 1.0)
    assert supervisor.handle(StopRequested(), 1.1) == [EndSupervisor(None)]
    assert supervisor.handle(SupervisorTick(), 50.0) == []


def test_a_process_that_could_not_start_while_stopping_is_no_reason_to_wait() -> None:
    """NotStarted may arrive after the stop was asked for; the end must not wait for that child."""
    supervisor = begun(0)
    supervisor.handle(StopRequested(), 0.0)
    assert supervisor.handle(ChildNotStarted("broker", "no memory"), 0.0) == [EndSupervisor(None)]


def test_more_workers_get_new_names() -> None:
    """Names go on where they stopped and are never used twice; memory limit and device stay the same over restarts."""
    supervisor = begun(2)
    supervisor.handle(ChildExited("w1", 0), 1.0)
    assert supervisor.handle(WorkersRequested(7, 2, 1 << 30, "cuda:1"), 2.0) == [
        StartChild("w2", 1 << 30, "cuda:1"),
        StartChild("w3", 1 << 30, "cuda:1"),
    ]
    supervisor.handle(ChildExited("w2", -9), 3.0)
    assert supervisor.handle(SupervisorTick(), 4.0) == [StartChild("w2", 1 << 30, "cuda:1")]


def test_whoever_asks_is_answered_when_the_workers_have_joined() -> None:
    """Not before: a process that was started may still turn out unable to work. Crashes on the way don't matter."""
    supervisor = begun(1)
    supervisor.handle(WorkersRequested(7, 2), 1.0)
    assert supervisor.handle(WorkersJoined(("w0", "w1")), 2.0) == []
    supervisor.handle(ChildExited("w2", -9), 2.0)
    assert supervisor.handle(WorkersJoined(("w0", "w1", "w2")), 3.0) == [AnswerRequest(7, ("w1", "w2"))]
    assert supervisor.handle(WorkersJoined(("w0", "w1", "w2")), 4.0) == []  # once


def test_a_worker_that_cannot_work_is_reported_to_whoever_asked() -> None:
    """With its own reason; the others are named as started."""
    supervisor = begun(1)
    supervisor.handle(WorkersRequested(7, 2, 1000), 1.0)
    supervisor.handle(WorkersJoined(("w0", "w1")), 2.0)
    assert supervisor.handle(ChildExited("w2", EX_CONFIG, "the limit is too little"), 3.0) == [
        ShowGivenUp("w2", "the limit is too little"),
        AnswerRequest(7, ("w1",), "w2 can't work: the limit is too little"),
    ]


def test_asking_has_an_end() -> None:
    """Who has not joined in time is reported, and so is everybody when all stops; two askers don't meet."""
    supervisor = begun(1)
    supervisor.handle(WorkersRequested(7, 1), 1.0)
    supervisor.handle(WorkersRequested(8, 1), 2.0)
    assert supervisor.wake_at() == 1.0 + JOIN_PATIENCE_S
    (answer,) = supervisor.handle(SupervisorTick(), 1.0 + JOIN_PATIENCE_S)
    assert answer == AnswerRequest(7, (), "w1 has not joined yet: see its log")
    first, *_ = supervisor.handle(StopRequested(), 50.0)
    assert first == AnswerRequest(8, (), "w2 is being stopped: this swarm up is stopping")


def test_more_workers_have_a_limit_and_an_end() -> None:
    """Too many, or too late: the answer says so, and nothing is started."""
    supervisor = begun(2)
    (answer,) = supervisor.handle(WorkersRequested(1, MAX_WORKERS - 1), 1.0)
    assert answer == AnswerRequest(1, (), f"2 workers run here already; the maximum is {MAX_WORKERS}")
    (answer,) = supervisor.handle(WorkersRequested(1, 1, device="auto"), 1.0)
    reason = "--device auto needs --memory-limit SIZE here: the others' device is cpu"
    assert answer == AnswerRequest(1, (), reason)
    supervisor.handle(StopRequested(), 2.0)
    assert supervisor.handle(WorkersRequested(2, 1), 2.0) == [AnswerRequest(2, (), "this swarm up is stopping")]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "ended with code 3"),
        (-9, "was ended by SIGKILL"),
        (-11, "was ended by SIGSEGV"),
        (-99, "signal 99"),
        (228, "signal 100"),
    ],
)
def test_exit_codes_in_words(code: int, words: str) -> None:
    """Signals have names, where they have one."""
    assert words in describe_exit(code)


def with_gateway(num_workers: int = 1) -> Supervisor:
    supervisor = Supervisor()
    actions = supervisor.handle(SupervisorStarted(num_workers, gateway=True), 0.0)
    assert StartChild(GATEWAY) not in actions
    return supervisor


def test_the_gateway_starts_when_the_swarm_serves() -> None:
    """Not earlier, since it would take the cores of those who load; once, however often it serves."""
    supervisor = with_gateway()
    assert supervisor.handle(SwarmServing(), 3.0) == [StartChild(GATEWAY)]
    assert supervisor.handle(SwarmServing(), 4.0) == []
    assert supervisor.wake_at() is None


def test_the_gateway_does_not_wait_for_ever() -> None:
    """It starts after a while in any case: somebody may want to hear why nothing serves."""
    supervisor = with_gateway(0)
    assert supervisor.wake_at() == GATEWAY_AFTER_S
    assert supervisor.handle(SupervisorTick(), GATEWAY_AFTER_S - 0.01) == []
    assert supervisor.handle(SupervisorTick(), GATEWAY_AFTER_S) == [StartChild(GATEWAY)]
    assert supervisor.handle(SwarmServing(), 60.0) == []


def test_a_gateway_that_ends_is_started_again_however_it_ended() -> None:
    for code in (0, 1, -9):
        supervisor = with_gateway()
        supervisor.handle(SwarmServing(), 1.0)
        (said,) = supervisor.handle(ChildExited(GATEWAY, code), 2.0)
        assert isinstance(said, ShowRestart)
        assert supervisor.handle(SupervisorTick(), 2.0 + FIRST_DELAY_S) == [StartChild(GATEWAY)]


def test_a_gateway_that_can_never_work_takes_nobody_with_it() -> None:
    """Even if it is the last that runs beside the broker, and nothing has served yet."""
    supervisor = with_gateway(0)
    supervisor.handle(SupervisorTick(), GATEWAY_AFTER_S)
    assert supervisor.handle(ChildExited(GATEWAY, EX_CONFIG, "its port is taken"), 11.0) == [
        ShowGivenUp(GATEWAY, "its port is taken")
    ]
    assert not supervisor.is_stopping
    assert supervisor.running() == ("broker",)


def test_a_gateway_is_no_worker() -> None:
    """The last worker that can't work ends a swarm that never served, gateway or not."""
    supervisor = with_gateway()
    supervisor.handle(SupervisorTick(), GATEWAY_AFTER_S)
    assert supervisor.workers() == ("w0",)
    actions = supervisor.handle(ChildExited("w0", EX_CONFIG, "no model"), 11.0)
    assert actions == [ShowGivenUp("w0", "no model"), TerminateChild(GATEWAY), TerminateChild("broker")]


def test_a_stop_before_the_gateway_started_starts_none() -> None:
    supervisor = with_gateway()
    supervisor.handle(StopRequested(), 1.0)
    assert supervisor.handle(SwarmServing(), 2.0) == []
    assert StartChild(GATEWAY) not in supervisor.handle(SupervisorTick(), 1.0 + GRACE_S)
