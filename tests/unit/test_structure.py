"""Structure of the code: allowed imports between packages, no cycles, one writing package per field of broker state."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import swarm

PACKAGE = Path(swarm.__file__).parent

# From below to above: a package may import itself and those before it in its own list, and what ``BESIDE`` adds.
BROKER = (
    "planner",
    "state",
    "planning",
    "vocabulary",
    "speculation",
    "steps",
    "reports",
    "recovery",
    "requests",
    "members",
    "admin",
    "auth",
)
STAGE = ("quantization", "native", "cuda", "matmul", "attention", "modules", "model", "engine", "shell")
VOCABULARY = ("actions", "events")  # of a core: what comes in, what goes out

# By package, which others it imports: those below it. Take out what is not used any more.
ALLOWED: dict[str, tuple[str, ...]] = {
    "wire": ("systemd", "errors", "params", "version"),
    "systemd": ("log", "config", "errors", "clock"),
    "auth": ("wire", "private_files", "errors", "version"),
    "client": ("wire", "auth", "cache_folder", "errors", "params", "grammar"),
    "broker": (
        "wire",
        "auth",
        "errors",
        "params",
        "clock",
        "series",
        "version",
        "log",
        "config",
        "failpoints",
        "systemd",
    ),
    "stage": (
        "wire",
        "hub",
        "auth",
        "cache_folder",
        "errors",
        "params",
        "grammar",
        "clock",
        "series",
        "version",
        "log",
        "config",
        "failpoints",
        "demo",
        "private_files",
        "systemd",
    ),
    "draft": ("wire", "stage", "errors", "params", "log"),
    "hub": ("errors",),
    "admin": ("wire", "errors"),
    "api_keys": ("private_files", "errors", "params"),
    "testing_images": ("wire", "stage", "errors", "params"),
    "testing": ("wire", "stage", "testing_images", "errors", "params"),
    "sim": ("wire", "client", "broker", "stage", "testing", "testing_images", "errors", "params"),
    "metrics": ("wire", "errors", "clock", "series", "version"),
    "gateway": (
        "wire",
        "client",
        "auth",
        "metrics",
        "api_keys",
        "admin",
        "errors",
        "params",
        "version",
        "log",
        "config",
        "failpoints",
        "private_files",
        "systemd",
    ),
    "bench": ("errors", "version", "screen"),
    "cli": (
        "wire",
        "client",
        "broker",
        "stage",
        "draft",
        "sim",
        "gateway",
        "api_keys",
        "auth",
        "bench",
        "errors",
        "params",
        "clock",
        "version",
        "log",
        "config",
        "safe_stream",
        "screen",
        "private_files",
        "demo",
        "hub",
        "systemd",
    ),
    "ctl": ("wire", "client", "cli", "metrics", "api_keys", "auth", "admin", "errors", "version", "config", "screen"),
    "__main__": ("cli",),
    "": ("client", "errors", "params", "version"),
    "config": ("errors", "version"),
    "log": ("config", "safe_stream", "journald"),
    "failpoints": ("errors",),
    "private_files": ("errors",),
    "params": ("errors",),
    "grammar": ("params", "errors"),
    "errors": (),
    "version": (),
    "cache_folder": (),
    "clock": (),
    "series": (),
    "safe_stream": (),
    "screen": (),
    "journald": (),
    "demo": (),
}


def modules() -> dict[str, Path]:
    """Every module by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name: str) -> set[str]:
    """The modules of ours that this one names in an import: lazy ones and those for type checkers too."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {other for other in found if other in MODULES and other != name}


GRAPH = {name: imports(name) for name in MODULES}


def top(name: str) -> str:
    """The first package below ``swarm``."""
    return name.split(".")[1] if "." in name else ""


@pytest.mark.parametrize("package", sorted({top(name) for name in MODULES}))
def test_a_package_imports_only_those_below_it(package: str) -> None:
    """And each that it may import: a permission that nobody uses is none."""
    found = [(top(b), f"{a} -> {b}") for a in MODULES if top(a) == package for b in GRAPH[a] if top(b) != package]
    assert not [way for other, way in found if other not in ALLOWED[package]]
    assert {other for other, _ in found} == set(ALLOWED[package])


def test_no_two_packages_import_each_other() -> None:
    """Nor does one import itself by way of others: the permissions have a beginning."""
    left = {package: set(others) for package, others in ALLOWED.items()}
    while lowest := [package for package, others in left.items() if not others & left.keys()]:
        for package in lowest:
            del left[package]
    assert not left


def subpackage(name: str, package: str) -> str | None:
    """The package within a package; None for what stands above all its packages: the core and the process."""
    parts = name.split(".")
    if len(parts) < 3 or parts[1] != package:
        return None
    if parts[2] in VOCABULARY:
        return "vocabulary"
    return parts[2] if (PACKAGE / package / parts[2]).is_dir() else None


def test_packages_of_the_broker_import_only_those_below_them() -> None:
    """The journal stands beside: it uses vocabulary, state and reports, and only the process uses it."""
    order = {name: number for number, name in enumerate(BROKER)}
    wrong = []
    for a in MODULES:
        mine = subpackage(a, "broker")
        for b in GRAPH[a]:
            other = subpackage(b, "broker")
            if top(b) != "broker" or mine is None or mine == other:
                continue
            if mine == "journal":
                is_fine = other in ("vocabulary", "state", "reports")
            else:
                is_fine = other in order and order[other] < order[mine]
            if not is_fine:
                wrong.append(f"{a} -> {b}")
    assert not wrong


def test_packages_of_a_stage_import_only_those_below_them() -> None:
    """All may use the core's vocabulary; the core and its helpers use no package. A package uses only the executor's
    interface of these, and the shell also the core that it carries out."""
    order = {name: number for number, name in enumerate(STAGE)}
    wrong = []
    for a in MODULES:
        if top(a) != "stage":
            continue
        mine = subpackage(a, "stage")
        for b in GRAPH[a]:
            other = subpackage(b, "stage")
            if top(b) != "stage" or other in (mine, "vocabulary"):
                continue
            if other is None:
                known = {"swarm.stage.executor", "swarm.stage"} | ({"swarm.stage.core"} if mine == "shell" else set())
                wrong += [f"{a} -> {b}"] if mine is not None and b not in known else []
            elif mine in (None, "vocabulary") or order[str(other)] > order[mine]:
                wrong.append(f"{a} -> {b}")
    assert not wrong


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Cycles are followed through packages' own modules; those for type checkers count."""
    done: set[str] = set()

    def follow(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for other in sorted(GRAPH[name]):
            if cycle := follow(other, [*way, name]):
                return cycle
        done.add(name)
        return []

    assert not [cycle for name in MODULES if (cycle := follow(name, []))]


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES.values()}), ids=lambda path: path.name)
def test_every_folder_says_what_it_decides(folder: Path) -> None:
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))


# Which package of the broker writes which field. The package ``state`` writes all other fields, in its methods. Remove
# a row when its field moves there; add none.
OWNERS = {
    "State": {
        "assets": "members",
        "journal_figures": "core",
        "journal_notes": "core",
        "journal_problem": "requests",
        "leases_renewed_at": "members",
        "next_sequence": "requests",
        "now": "core",
        "prefixes": "recovery",
        "process_figures": "core",
        "requests": "requests",
        "sequences": "requests",
        "blocked_clients": "requests",
        "ticked_at": "core",
        "workers": "members",
    },
    "PlanState": {
        "repeat_orders_at": "recovery",
        "awaited": "recovery",
        "members_changed_at": "recovery",
        "epoch": "recovery",
        "deadline": "recovery",
        "pending_orders": "recovery",
        "phase": "recovery",
        "prepared": "recovery",
        "waits_for": "recovery",
        "journaled_epoch": "recovery",
    },
    "Rebuilding": {
        "began_at": "recovery",
        "chunk_positions": "recovery",
        "ordered_at": "recovery",
        "queue": "recovery",
        "reports": "recovery",
        "in_progress": "recovery",
    },
    "RestartState": {
        "awaited": "recovery",
        "gather_until": "recovery",
        "is_over": "recovery",
        "model_is_remembered": "recovery",
        "rejoin_until": "recovery",
    },
    "RunningSequences": {"prompts_are_next": "steps"},
    "SchedulerDecision": {
        "step_budget": "steps",
        "depth": "steps",
        "mode": "steps",
        "prompt_tokens": "steps",
        "throttle": "steps",
    },
    "DataPathErrors": {
        "num_damaged": "members",
        "num_lost": "members",
    },
    "Evidence": {"suspects_are_next": "steps"},
    "AcceptState": {
        "closed": "members",
        "closed_at": "members",
        "closed_s": "members",
        "retry_at": "members",
        "opened_at": "members",
        "pause_s": "members",
        "problem": "members",
        "reason": "members",
        "num_closures": "members",
    },
    "KeyState": {
        "must_resend": "members",
        "sent_keys": "members",
        "accepted": "members",
        "sent_tickets": "members",
    },
    "HeartbeatHistory": {},
    "Sequence": {},
    "Request": {
        "accepted": "requests",
        "client": "requests",
        "detached_at": "requests",
        "owner": "requests",
        "read_at": "requests",
        "sequences": "requests",
        "is_blocked": "requests",
    },
    "Worker": {
        "ordered_warm_layers": "recovery",
        "call_after": "members",
        "disagreed_with": "members",
        "load_bytes_per_s": "recovery",
        "loaded_bytes": "recovery",
        "num_confirmed": "members",
        "num_faults": "members",
        "num_removals": "members",
        "num_corrupt_results": "members",
        "pace": "recovery",
        "planned_layers": "recovery",
        "stats": "members",
        "total_bytes": "recovery",
        "wants_to_leave": "members",
    },
}
CHANGES = {"append", "add", "clear", "pop", "remove", "extend", "discard", "update", "setdefault", "popitem", "insert"}
# How such a value is called where it is written.
NAMES = {
    "State": ("state", "self.state", "self._state"),
    "PlanState": ("plans", "self._plans", "self.plans", "state.plans", "self.state.plans", "self._state.plans"),
    "Rebuilding": ("self.rebuilding", "rebuilding", "self.state.rebuilding", "self._state.rebuilding"),
    "RestartState": ("self.progress", "restart", "state.restart", "self._state.restart"),
    "RunningSequences": ("running", "state.running", "self.state.running", "self._state.running"),
    "SchedulerDecision": ("decision", "state.decision", "self.state.decision", "self._state.decision"),
    "DataPathErrors": (
        "data_path_errors",
        "state.data_path_errors",
        "self.state.data_path_errors",
        "self._state.data_path_errors",
    ),
    "Evidence": ("evidence", "state.evidence", "self.state.evidence"),
    "AcceptState": ("self.accept_state", "state.accept", "self.state.accept", "self._state.accept"),
    "KeyState": ("self.keys",),
    "HeartbeatHistory": ("heartbeats", "worker.heartbeats"),
    "Sequence": ("sequence", "s", "other", "victim", "each", "first", "passed[0]", "trial.sequence"),
    "Request": ("request", "existing", "r", "sequence.request", "trial.sequence.request"),
    "Worker": (
        "worker",
        "w",
        "former",
        "suspect",
        "holder",
        "known",
        "other",
        "self._state.workers[stage.incarnation]",
    ),
}
HOME = {
    "State": "state",
    "PlanState": "plans",
    "Rebuilding": "rebuilding",
    "RestartState": "plans",
    "RunningSequences": "running",
    "SchedulerDecision": "state",
    "DataPathErrors": "state",
    "Evidence": "evidence",
    "AcceptState": "state",
    "KeyState": "state",
    "HeartbeatHistory": "workers",
    "Sequence": "sequences",
    "Request": "sequences",
    "Worker": "workers",
}


def fields_of(kind: str) -> set[str]:
    tree = ast.parse((PACKAGE / "broker" / "state" / f"{HOME[kind]}.py").read_text())
    found = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == kind)
    declared = [line.target for line in found.body if isinstance(line, ast.AnnAssign)]
    begins = [n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    set_there = {target.attr for target in written(begins[0])} if begins else set()
    return {target.id for target in declared if isinstance(target, ast.Name)} | set_there


def written(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes that are assigned, deleted, or whose container is changed in place."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [e for t in node.targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            targets = [node.func.value]
        for target in map(without_index, targets):
            if isinstance(target, ast.Attribute):
                yield target


def without_index(target: ast.expr) -> ast.expr:
    return without_index(target.value) if isinstance(target, ast.Subscript) else target


def writers(kind: str) -> dict[str, set[str]]:
    """Field -> the packages outside of ``state`` that write it."""
    fields, found = fields_of(kind), defaultdict(set)
    for name, path in MODULES.items():
        place = subpackage(name, "broker") or name.rpartition(".")[2]
        if top(name) != "broker" or place == "state":
            continue
        for target in written(ast.parse(path.read_text())):
            if target.attr in fields and ast.unparse(target.value) in NAMES[kind]:
                found[target.attr].add(place)
    return dict(found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(OWNERS))
def test_each_field_is_written_by_one_package(kind: str) -> None:
    others = {  # values with verbs of their own
        "rebuilding",
        "running",
        "ended_requests",
        "timers",
        "awaiting_journal",
        "waiting",
    }
    found = writers(kind)
    if kind == "State":
        assert others <= found.keys()  # a permission that nobody uses is none
        found = {field: packages for field, packages in found.items() if field not in others}
    assert found == {field: {owner} for field, owner in OWNERS[kind].items()}


@pytest.mark.slow
def test_nobody_writes_such_a_field_under_another_name() -> None:
    """Whatever has a field of that name and is called otherwise is named here: so a new name for a sequence or a worker
    does not slip through."""
    kinds = defaultdict(set)
    for kind in OWNERS:
        for field in fields_of(kind):
            kinds[field].add(kind)
    found = set()
    for name, path in MODULES.items():
        if top(name) != "broker" or subpackage(name, "broker") == "state":
            continue
        for target in written(ast.parse(path.read_text())):
            holder = ast.unparse(target.value)
            is_known = any(holder in NAMES[kind] for kind in kinds.get(target.attr, ()))
            if target.attr in kinds and holder != "self" and not is_known:
                found.add((name, holder, target.attr))
    assert found == {
        ("swarm.broker.members.assets", "upload", "received_at"),
    }
