"""Mutants of swarm/gateway/console."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="console-resumes-another-life",
        breaks="The console resumes a stream by an event id of another gateway process, so that events are missing.",
        target="swarm.gateway.console.audience:Audience.since",
        old="if match is None or match[1] != self.life:",
        new="if match is None:",
        caught_by="tests/unit/gateway/console/test_audience.py::test_who_names_another_life_or_nothing_known_gets_all",
    ),
    Mutant(
        name="console-kills-by-number",
        breaks="The console kills the process with the number that a worker reports, even if it is not its own.",
        target="swarm.gateway.console.household:victim",
        old='is_ours = row.get("host") == host and isinstance(pid, int) and beside.get(str(row.get("name"))) == pid',
        new='is_ours = row.get("host") == host and isinstance(pid, int) and pid in beside.values() or pid is not None',
        caught_by="tests/unit/gateway/console/test_household.py::test_no_other_process_is_ended",
    ),
    Mutant(
        name="console-reads-any-file",
        breaks="The console follows symbolic links in the log folder.",
        target="swarm.gateway.console.logs:_sizes",
        old="""
            if entry.name.endswith((_END, _OLDER)) and entry.is_file(follow_symlinks=False) and len(found) < MAX_FILES:
        """,
        new="if entry.name.endswith((_END, _OLDER)) and entry.is_file() and len(found) < MAX_FILES:",
        caught_by="tests/unit/gateway/console/test_logs.py::test_names_are_compared_and_lead_nowhere",
    ),
    Mutant(
        name="console-who-owns-a-request-governs",
        breaks="The owner of a running request may give any order in the console.",
        target="swarm.gateway.console.orders:check_may",
        old="if is_admin or (isinstance(order, Cancel) and is_own):",
        new="if is_admin or is_own:",
        caught_by="tests/unit/gateway/console/test_orders.py::test_nobody_else_may_govern",
    ),
    Mutant(
        name="console-idle-swarm-makes-news",
        breaks="Heartbeats of an idle swarm send updates to the console.",
        target="swarm.gateway.console.view:_worker",
        old='body["evidence"] = _BEAT.sub("", str(row.get("evidence") or ""))',
        new='body["evidence"] = str(row.get("evidence") or "")',
        caught_by="tests/unit/gateway/console/test_view.py::test_an_idle_swarm_makes_no_news",
    ),
    Mutant(
        name="console-shows-others-requests",
        breaks="The console shows a tenant the requests of other tenants.",
        target="swarm.gateway.console.view:seen_by",
        old='own = {key: row for key, row in whole["requests"].items() if row.get("tenant") == tenant}',
        new='own = {key: row for key, row in whole["requests"].items() if row.get("tenant")}',
        caught_by="tests/unit/gateway/console/test_view.py::test_a_tenant_sees_its_own_requests_alone",
    ),
    Mutant(
        name="console-waits-for-slow-readers",
        breaks="The queue for a slow reader of the console grows without bound.",
        target="swarm.gateway.console.watch:Viewer.tell",
        old="if len(self._waiting) + len(told) > MAX_WAITING:",
        new="if len(told) > MAX_WAITING:",
        caught_by="tests/unit/gateway/console/test_watch.py::test_who_lags_behind_gets_the_whole_instead",
    ),
)
