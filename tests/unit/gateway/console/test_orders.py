"""What a body orders, what is wrong with it, and who may."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.gateway.console.commands import (
    CancelCommand,
    ConsoleCommand,
    JoinCommand,
    KillCommand,
    StopCommand,
    check_admin,
    check_allowed,
    parse_command,
    parse_plan_question,
)
from swarm.gateway.errors import ApiError
from swarm.wire.messages import Cap, LayerRange, Pin, PlanCommand, PlanOverrides, PlanWhatIf

ID = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    ("body", "order"),
    [
        ({"verb": "cancel", "request": ID}, CancelCommand(ID)),
        ({"verb": "cancel", "request": f"chatcmpl-{ID}"}, CancelCommand(ID)),
        ({"verb": "drain", "worker": "w0"}, PlanCommand(verb="drain", worker="w0")),
        ({"verb": "cordon", "worker": "w0"}, PlanCommand(verb="cordon", worker="w0")),
        ({"verb": "uncordon", "worker": "w0"}, PlanCommand(verb="uncordon", worker="w0")),
        ({"verb": "stop", "worker": "w0"}, StopCommand("w0", force=False)),
        ({"verb": "stop", "worker": "w0", "force": True}, StopCommand("w0", force=True)),
        ({"verb": "kill", "worker": "w0"}, KillCommand("w0")),
        ({"verb": "join"}, JoinCommand(1)),
        ({"verb": "join", "count": 3}, JoinCommand(3)),
        ({"verb": "rebalance"}, PlanCommand(verb="rebalance")),
        ({"verb": "plan"}, PlanCommand(verb="plan")),
        (
            {
                "verb": "plan",
                "suppose": {"pins": {"w0": [0, 3]}, "caps": {"w1": 2}, "exclude": ["w2"], "objective": "latency"},
            },
            PlanCommand(
                verb="plan",
                by_hand=PlanOverrides((Pin("w0", LayerRange(0, 3)),), (Cap("w1", 2),), ("w2",), "latency"),
            ),
        ),
    ],
)
def test_bodies_are_orders(body: dict[str, Any], order: ConsoleCommand) -> None:
    assert parse_command(body) == order


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (None, "object"),
        ([], "object"),
        ({}, "verb"),
        ({"verb": ["cancel"]}, "verb"),
        ({"verb": "shut down"}, "'shut down' is none of cancel, drain"),
        ({"verb": "cancel"}, "request"),
        ({"verb": "cancel", "request": "x" * 129}, "request"),
        ({"verb": "drain"}, "worker's name"),
        ({"verb": "drain", "worker": 7}, "worker's name"),
        ({"verb": "kill", "worker": ""}, "worker's name"),
        ({"verb": "stop", "worker": "w0", "force": "yes"}, "force"),
        ({"verb": "join", "count": 65}, "from 1 to 64"),
        ({"verb": "join", "count": True}, "from 1 to 64"),
        ({"verb": "plan", "suppose": {"pins": {"w0": [3, 3]}}}, "pins"),
        ({"verb": "plan", "suppose": {"pins": [1]}}, "pins"),
        ({"verb": "plan", "suppose": {"caps": {"w0": 0}}}, "caps"),
        ({"verb": "plan", "suppose": {"exclude": "w0"}}, "exclude"),
        ({"verb": "plan", "suppose": {"objective": "beauty"}}, "throughput or latency, not 'beauty'"),
    ],
)
def test_what_is_wrong_is_named(body: Any, words: str) -> None:
    with pytest.raises(ApiError) as told:
        parse_command(body)
    assert told.value.status == 400
    assert words in told.value.message


def test_what_may_be_supposed_is_what_swarmctl_supposes() -> None:
    assert parse_plan_question({"without": ["w0"]}) == PlanWhatIf(without=("w0",))
    assert parse_plan_question({"one_more": {}}) == PlanWhatIf(more=1)
    assert parse_plan_question({"one_more": {"count": 2, "like": "w1"}, "objective": "latency"}) == PlanWhatIf(
        more=2, like="w1", objective="latency"
    )
    assert parse_plan_question({"objective": "throughput", "one_more": None}) == PlanWhatIf(objective="throughput")
    assert parse_plan_question({"caps": {"w0": 3}, "objective": ""}) == PlanCommand(
        verb="plan", by_hand=PlanOverrides(caps=(Cap("w0", 3),)), dry_run=True
    )
    with pytest.raises(ApiError, match="can't be combined"):
        parse_plan_question({"without": ["w0"], "caps": {"w0": 3}})


ORDERS: list[ConsoleCommand] = [
    CancelCommand(ID),
    PlanCommand(verb="drain", worker="w0"),
    StopCommand("w0", force=False),
    JoinCommand(1),
]


@pytest.mark.parametrize("order", ORDERS)
def test_an_admin_may_all_but_kill_where_nothing_is_for_show(order: ConsoleCommand) -> None:
    check_allowed(order, is_admin=True, is_demo=False, is_own=False)
    check_allowed(KillCommand("w0"), is_admin=True, is_demo=True, is_own=False)
    with pytest.raises(ApiError) as told:
        check_allowed(KillCommand("w0"), is_admin=True, is_demo=False, is_own=False)
    assert (told.value.status, told.value.code) == (403, "no_demo")


@pytest.mark.parametrize("order", [*ORDERS[1:], KillCommand("w0")])
def test_nobody_else_may_govern(order: ConsoleCommand) -> None:
    with pytest.raises(ApiError) as told:
        check_allowed(order, is_admin=False, is_demo=True, is_own=True)
    assert (told.value.status, told.value.code) == (403, "admin_only")
    assert "--admin" in told.value.message


def test_who_is_no_admin_cancels_its_own_alone() -> None:
    """Of others' requests it is not even told that there are any."""
    check_allowed(CancelCommand(ID), is_admin=False, is_demo=False, is_own=True)
    with pytest.raises(ApiError) as told:
        check_allowed(CancelCommand(ID), is_admin=False, is_demo=False, is_own=False)
    assert told.value.status == 404
    with pytest.raises(ApiError):
        check_admin(is_admin=False)
