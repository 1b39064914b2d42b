"""What a shell offers behind the words so far: bash, zsh and fish themselves, with the scripts that ours print."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from swarm.cli.main import run as run_swarm
from swarm.ctl.main import run as swarmctl
from swarm.wire.messages import Report
from tests.integration.fake_broker import FakeBroker

pytestmark = pytest.mark.usefixtures("own_cache")
SOON_S = 60

# What bash does when somebody has pressed the tabulator behind these words.
_BASH = """
eval "$("$1" completion bash)"
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
function=$(complete -p "$1" | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function "$1" "${@: -1}" "${@: -2:1}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
_FISH = """
$argv[1] completion fish | source
complete --do-complete "$argv"
"""
# What zsh offers with a text is told by compadd, in whose place somebody writes it down. The key that follows the
# tabulator ends the shell.
_ZSH = """
autoload -U compinit; compinit -u -D
eval "$({program} completion zsh)"
compadd() {{
  local -a found texts
  local i=${{@[(i)-d]}}
  [[ "$*" == *" -"[OAD]" "* ]] || {{ builtin compadd -O found "$@"; texts=(${{(P)@[i+1]}}); }}
  for ((i = 1; i <= $#found; i++)); do print -r -- "$found[i]" "$texts[i]" >> {found}; done
  builtin compadd "$@"
}}
ended() {{ exit }}
zle -N ended; bindkey '^X' ended
"""


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"not installed: {shell}")


@pytest.fixture(autouse=True)
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Knows of two workers that are here, and of one that is out."""
    workers = [{"name": "w0", "state": "member"}, {"name": "w1", "state": "member"}, {"name": "w2", "state": "out"}]
    with FakeBroker(lambda submit, index: []).in_thread() as broker:
        broker.reports["nodes"] = Report(what="nodes", ok=True, body={"workers": workers})
        monkeypatch.setenv("SWARM_URL", broker.url)
        yield


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are installed."""
    for program, module in (("swarm", "swarm.cli.main"), ("swarmctl", "swarm.ctl.main")):
        script = f"#!{sys.executable}\nfrom {module} import main\nmain()\n"
        (tmp_path / program).write_text(script)
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)


WORDS = pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("swarmctl", "unc"), ["uncordon"]),
        (("swarmctl", "drain", "w"), ["w0", "w1"]),
        (("swarmctl", "plan", "--exclude", "w1"), ["w1"]),
        (("swarmctl", "--url", "tcp://127.0.0.1:9", "drain", "w"), []),
        (("swarm", "config", ""), ["check", "show"]),
    ],
    ids=" ".join,
)


def said_by(*command: str) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SOON_S, check=False
    )
    assert done.stderr == ""
    return done.stdout


@needs("bash")
@WORDS
def test_bash_completes(words: tuple[str, ...], expected: list[str]) -> None:
    """Commands; the names of workers that are there, if the broker answers; nothing, in silence, if it doesn't."""
    assert said_by("bash", "--norc", "-c", _BASH, "bash", *words).split() == expected


@needs("fish")
@WORDS
def test_fish_completes(words: tuple[str, ...], expected: list[str], tmp_path: Path) -> None:
    """The same. Where we have nothing to offer, it offers files."""
    offered = [line.partition("\t")[0] for line in said_by("fish", "--no-config", "-c", _FISH, *words).splitlines()]
    assert [each for each in offered if not (tmp_path / each).exists()] == expected


def offered_by_zsh(words: tuple[str, ...], folder: Path) -> list[str]:
    """Each with what is said of it. zsh completes on a terminal only, so it has one."""
    found = folder / "found"
    (folder / ".zshrc").write_text(_ZSH.format(program=words[0], found=found))
    ours, its = pty.openpty()
    environment = os.environ | {"ZDOTDIR": str(folder), "TERM": "dumb"}
    shell = subprocess.Popen(["zsh", "-d", "-i"], stdin=its, stdout=its, stderr=its, env=environment)
    os.close(its)

    def drain() -> None:
        with suppress(OSError):  # at its end
            while os.read(ours, 65536):
                pass

    drained = threading.Thread(target=drain)
    drained.start()
    try:
        os.write(ours, f"{' '.join(words)}\t\x18".encode())
        shell.wait(SOON_S)
    finally:
        shell.kill()
        shell.wait()
        drained.join()
        os.close(ours)
    return found.read_text().splitlines() if found.exists() else []


@needs("zsh")
@WORDS
def test_zsh_completes(words: tuple[str, ...], expected: list[str], tmp_path: Path) -> None:
    """The same. Where we have nothing to offer, it offers files."""
    offered = [line.split()[0] for line in offered_by_zsh(words, tmp_path)]
    assert sorted({each for each in offered if not (tmp_path / each).exists()}) == expected


@needs("zsh")
def test_what_zsh_says_of_each_has_its_apostrophes(tmp_path: Path) -> None:
    (line,) = {line for line in offered_by_zsh(("swarmctl", "--url"), tmp_path) if line.startswith("--url")}
    assert "The broker's port for clients" in line


@pytest.mark.parametrize("program", ["swarm", "swarmctl"])
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_script(program: str, shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With where it belongs; --json has the same. The shell, if it is here, can read it."""
    run = {"swarm": run_swarm, "swarmctl": swarmctl}[program]
    assert run(["completion", shell]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("# ")
    assert f"_{program.upper()}_COMPLETE" in shown
    assert run(["completion", shell, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["script"] in shown
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=shown, text=True, check=True, timeout=SOON_S)
