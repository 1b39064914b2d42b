"""Every command that a document names is there, with its options, and is run by a test, or it is said why by none.

``tests/integration/test_documents.py`` runs those that only ask, as they stand, against a swarm."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import (
    PAGES,
    PROGRAMS,
    ROOT,
    Command,
    all_our_options,
    blocks,
    commands,
    named,
    options,
    options_of,
    parse,
    typed,
)

AS_IT_STANDS = "integration/test_documents.py::test_what_only_asks_is_run_as_it_stands"
# Who runs it: the command, and a test of it.
RUN = {
    **dict.fromkeys(
        (
            "swarm attach",
            "swarm completion",
            "swarm config check",
            "swarm config show",
            "swarm generate",
            "swarmctl cancel",
            "swarmctl completion",
            "swarmctl config show",
            "swarmctl events",
            "swarmctl doctor",
            "swarmctl nodes",
            "swarmctl plan",
            "swarmctl recoveries",
            "swarmctl requests",
            "swarmctl standby",
            "swarmctl stats",
            "swarmctl status",
            "swarmctl trace",
            "swarmctl version",
        ),
        AS_IT_STANDS,
    ),
    "curl": "integration/test_documents.py::test_curl_is_answered",
    "pip": "integration/test_installation.py::test_an_installed_package_uses_its_kernels",
    "python -m swarm.config": "unit/test_config.py::test_the_file_in_the_repository_is_the_template",
    "swarm demo": "integration/test_detached.py::test_demo",
    "swarm down": "integration/test_detached.py::test_a_detached_swarm_is_listed_logged_and_ended",
    "swarm logs": "integration/test_detached.py::test_a_detached_swarm_is_listed_logged_and_ended",
    "swarm ps": "integration/test_detached.py::test_a_detached_swarm_is_listed_logged_and_ended",
    "swarm models": "integration/test_hub.py::test_pull_fetches_all_and_models_lists_it",
    "swarm models check": "unit/cli/test_models_command.py::test_a_folder_is_checked_by_its_configuration",
    "swarm pull": "integration/test_hub.py::test_pull_fetches_all_and_models_lists_it",
    "swarm embed": "integration/test_client_commands.py::test_embeddings_are_printed",
    "swarm doctor": "unit/cli/test_doctor.py::test_the_whole_command",
    "swarm batch list": "integration/test_batch_command.py::test_batches_are_listed_shown_and_cancelled",
    "swarm batch run": "integration/test_batch_command.py::test_a_file_is_answered_and_not_run_twice",
    "swarm bench": "integration/test_bench.py::test_a_sweep_finds_where_a_server_is_full_and_writes_its_page",
    "swarm chat": "integration/test_client_commands.py::test_chat_remembers",
    "swarm discover": "integration/test_hosts.py::test_only_who_wishes_it_is_found",
    "swarm gateway": "integration/test_gateway_upstream.py::test_others_answer_by_name_and_for_a_swarm_that_is_down",
    "swarm profile": "integration/test_measuring.py::test_profile_of_a_swarm_of_its_own",
    "swarm sim": "unit/cli/test_sim_command.py::test_one_seed",
    "swarm systemd install": "integration/test_systemd.py::test_all_of_it_serves_and_says_so",
    "swarm systemd status": "integration/test_systemd.py::test_all_of_it_serves_and_says_so",
    "swarm systemd uninstall": "integration/test_systemd.py::test_uninstalling_leaves_nothing",
    "swarm up": "integration/test_up.py::test_one_command_is_a_swarm",
    "swarm worker": "integration/test_hosts.py::test_a_worker_and_a_client_join_by_invitation",
    **dict.fromkeys(
        ("swarmctl adapters", "swarmctl adapters load", "swarmctl adapters drop"),
        "integration/test_adapter_loads.py::test_the_command_line_lists_loads_and_drops",
    ),
    "swarmctl cordon": "integration/test_plan_command.py::test_an_operator_steers_while_it_serves",
    "swarmctl drain": "integration/test_plan_command.py::test_an_operator_steers_while_it_serves",
    "swarmctl invite": "integration/test_keys_commands.py::test_an_invitation_has_all_that_is_needed",
    "swarmctl join": "integration/test_client_commands.py::test_join_and_stop",
    "swarmctl keys add": "integration/test_gateway_up.py::test_other_machines_need_keys",
    "swarmctl keys list": "integration/test_keys_commands.py::test_the_list_has_both_kinds",
    "swarmctl keys revoke": "integration/test_keys_commands.py::test_what_is_revoked_is_found_among_both",
    "swarmctl keys rotate": "integration/test_keys_commands.py::test_a_members_key_is_changed_by_its_name",
    "swarmctl keys show": "integration/test_keys_commands.py::test_a_machine_shows_what_it_has_joined",
    "swarmctl rebalance": "integration/test_plan_command.py::test_an_operator_steers_while_it_serves",
    "swarmctl stop": "integration/test_client_commands.py::test_join_and_stop",
    "swarmctl top": "integration/test_top.py::test_top_of_a_real_swarm",
    "swarmctl uncordon": "integration/test_plan_command.py::test_an_operator_steers_while_it_serves",
    "swarmctl upgrade": "integration/test_upgrade.py::test_all_workers_are_started_anew_under_load",
    "systemctl": "integration/test_systemd.py::test_settings_are_read_again",
    "journalctl": "integration/test_systemd.py::test_events_are_in_the_journal_by_their_fields",
    "systemd-analyze": "unit/systemd/test_units.py::test_they_are_hardened",
    "runuser": "integration/test_systemd.py::test_an_api_key_is_made_by_the_units_user",
    "tools/quickstart": "integration/test_up.py::test_the_quickstart_shows_a_swarm",
    "tools/play_schedules.py": "unit/sim/test_play_schedules.py::test_it_goes_on_behind_what_was_played",
    "# copy": "integration/test_backup.py::test_a_copy_of_a_live_brokers_state_is_put_back",
    "# put back": "integration/test_backup.py::test_a_copy_of_a_live_brokers_state_is_put_back",
}
# By none, and why.
NOT_RUN = {
    "docker": "no builder and no daemon where tests run; what containers run is parsed (test_running)",
    "kubectl": "no cluster; the manifest is held against the schemas, its commands are parsed (test_running)",
    "sbatch": "no cluster; the script's commands are parsed (test_running)",
    "pre-commit": "of one who develops, in a checkout of their own",
    "eval": "of the shell; what it is given is found in its words",
    "pytest": "this is run by it",
    "tools/check": "it runs all of this",
    "tools/": "figures and long trials, minutes each; their options are looked up",
    "export": "of the shell",
    "head": "of the shell",
    "mv": "of the shell",
}
# What begins a command line between backticks; more words must follow.
BEGINS = re.compile(r"(swarm|swarmctl|pip|pytest|systemctl|journalctl|systemd-analyze|curl|python|eval|tools/\S+)\s+\S")
# Between backticks, but no command lines: what ps shows.
TITLES = ("swarm nursery MODEL", "swarm … worker … --name w0")
SOURCES = {".c", ".h", ".js", ".md", ".patch", ".py", ".service", ".toml", ".yaml", ".yml"}
# Options that belong to other programs than ours.
OTHERS = {"--help", "--nofile", "--build-arg", "--lib", "--pid", "--nice"}


def told() -> Iterator[tuple[str, Command]]:
    """(page, command), from blocks and from the running text."""
    for page in PAGES:
        if page == "CHANGELOG.md":  # tells of what was, too
            continue
        for line in typed(page):
            yield from ((page, command) for command in commands(line))
        for line in named(page):
            if BEGINS.match(line) and line not in TITLES:
                yield from ((page, command) for command in commands(line, is_short=True))
        for body in blocks(page, "bash"):
            yield page, Command((re.sub(r" \(.*", "", body.splitlines()[0]),))


TOLD = list(dict.fromkeys(told()))


def held_by(name: str) -> str:
    return name if name in RUN or not name.startswith("tools/") or name in NOT_RUN else "tools/"


@pytest.mark.parametrize(
    ("page", "command"),
    [pytest.param(*each, id=" ".join(each[1].words)[:70]) for each in TOLD if each[1].words[0] in PROGRAMS],
)
def test_a_command_of_ours_is_one(page: str, command: Command) -> None:
    assert page
    parse(command)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "command"), [each for each in TOLD if each[1].words[0].startswith(("tools/", "examples/"))]
)
def test_a_tool_is_there_with_its_options(page: str, command: Command) -> None:
    script, *words = command.words
    assert (ROOT / script).is_file(), f"{page} names {script}"
    assert set(options(tuple(words))) <= options_of(script) | ({"-k"} if script == "tools/check" else set())


@pytest.mark.slow
def test_options_in_the_running_text_exist() -> None:
    """Those that stand alone, too: ``--rate 20``."""
    tools = {option for path in ROOT.glob("tools/*") if path.is_file() for option in options_of(f"tools/{path.name}")}
    known = all_our_options() | tools | OTHERS
    missing = [
        (page, line)
        for page in PAGES
        if page != "CHANGELOG.md"
        for line in named(page)
        if line.startswith("--") and not set(options(tuple(line.split()))) <= known
    ]
    assert not missing


def test_pages_named_in_other_files_exist() -> None:
    """In code, tests, settings and pages: error messages lead users there."""
    folders = ("config", "docs", "examples", "swarm", "systemd", "tests", "tools")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]
    files += [path for path in ROOT.glob("*.*") if path.suffix in SOURCES]
    missing = {
        (str(path.relative_to(ROOT)), page)
        for path in files
        for page in re.findall(r"\bdocs/[\w/-]+\.(?:md|toml)\b", path.read_text(errors="replace"))
        if not (ROOT / page).exists()
    }
    assert sorted(missing) == []


def test_units_in_documents_are_ours() -> None:
    units = {path.name.split(".")[0].partition("@")[0] for path in (ROOT / "systemd").iterdir()}
    found = [word for _, command in TOLD if command.words[0] == "systemctl" for word in command.words]
    assert {"swarm-broker", "swarm.target"} <= set(found)
    assert {re.split(r"[@.]", word)[0] for word in found if word.startswith("swarm")} <= units


def test_every_command_is_run_by_a_test_or_it_is_said_why_not() -> None:
    found = {held_by(command.name) for _, command in TOLD} - {"swarm", "swarmctl", "swarmctl keys"}  # options, a group
    assert sorted(found - set(RUN) - set(NOT_RUN)) == [], "say in RUN which test runs it"
    assert sorted({*RUN, *NOT_RUN} - found) == [], "no document names it any more"


@pytest.mark.parametrize(("name", "test"), RUN.items())
def test_the_test_that_runs_it_is_there(name: str, test: str) -> None:
    path, _, function = test.partition("::")
    source = (Path(__file__).parents[1] / path).read_text()
    functions = {
        node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert function in functions
    if test != AS_IT_STANDS and "." not in name and " " in name:
        assert name.rsplit(maxsplit=1)[-1] in source


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a | swarm up --workers $N & x --  swarmctl status 2>/dev/null", ["swarm up --workers 3", "swarmctl status"]),
        (
            "swarmctl status | nodes · swarmctl keys list   # all",
            ["swarmctl status", "swarmctl nodes", "swarmctl keys list"],
        ),
        ('eval "$(swarm completion bash)"', ["swarm completion bash"]),
        ("swarm generate 'a | b' --regex '\\d'", ["swarm generate a | b --regex \\d"]),
        ("kubectl exec x -- swarmctl drain w --yes > file", ["swarmctl drain w --yes"]),
        ("SWARM_URL=x swarm --log-level debug config show", ["swarm --log-level debug config show"]),
        ("pip install 'swarm-llm[bench]'", []),
    ],
)
def test_commands_are_found_where_they_stand(line: str, expected: list[str]) -> None:
    assert [" ".join(command.words) for command in commands(line) if command.words[0] in PROGRAMS] == expected


@pytest.mark.parametrize(
    "line", ["swarm up --no-such", "swarmctl nosuch", "swarm up --workers many", "swarmctl keys nosuch", "swarm attach"]
)
def test_what_does_not_exist_is_refused(line: str) -> None:
    (command,) = commands(line)
    with pytest.raises(Exception, match=r"nosuch|no-such|integer|Missing"):
        parse(command)
