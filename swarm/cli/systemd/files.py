"""Files and directories that are written and removed, and the program that units start."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from swarm.systemd.install import InstallTarget

_FORBIDDEN_CHARACTERS: Final = frozenset("'\"\\")  # characters that systemd rejects in the path of a program
_HIDDEN: Final = ("/home", "/root", "/run/user")  # directories that units can't see
# where images usually have the program
_USUAL: Final = ("/opt/swarm/bin/swarm", "/usr/local/bin/swarm", "/usr/bin/swarm")
_SHEBANG_BYTES: Final = 256


class SystemdError(Exception):
    """An action that failed, with the reason for the user."""


def write_file(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o644)
    except OSError as error:
        raise SystemdError(f"{path} can't be written ({error.strerror}): root can, or use --user") from None


def remove_file(path: Path) -> None:
    """Remove the file, and its directory of drop-ins if that is empty then."""
    try:
        path.unlink(missing_ok=True)
        if path.parent.name.endswith(".d") and path.parent.name.startswith("swarm") and not any(path.parent.iterdir()):
            path.parent.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise SystemdError(f"{path} can't be removed ({error.strerror}): root can, or use --user") from None


def purge(target: InstallTarget) -> list[str]:
    """Remove settings, state and caches; return what could not be removed."""
    base = target.home / ".local" if target.is_user else target.root
    if target.is_user:
        places = [base / "state/swarm", target.home / ".cache/swarm"]
    else:
        caches = [base / "var/cache/swarm", base / "var/cache/swarm-gateway"]
        places = [base / "var/lib/swarm", *caches, base / "run/swarm"]
    return [wrong for place in (target.settings, *places) for wrong in _remove_tree(place)]


def _remove_tree(place: Path) -> Iterator[str]:
    """Remove a tree as far as possible; yield the first error, if any."""
    errors: list[tuple[str, BaseException]] = []

    def keep(_: object, path: str, info: tuple[type[BaseException], BaseException, object]) -> None:
        if not isinstance(info[1], FileNotFoundError):
            errors.append((path, info[1]))

    shutil.rmtree(place, onerror=keep)
    if errors:
        path, error = errors[0]
        yield f"{path} can't be removed ({getattr(error, 'strerror', None) or error})"


# --- the program ------------------------------------------------------------------------------------------------------


def own_program() -> Path:
    """Return this installation's ``swarm`` program for the units."""
    beside = Path(sys.executable).parent / "swarm"
    found = beside if beside.exists() else shutil.which("swarm")
    if found is None:
        raise SystemdError("there is no program swarm next to this Python: install the package with pip")
    return _check_path(Path(found).absolute())


def shared_program() -> Path:
    """Return the program for units with a user of their own, which can't see home directories."""
    program = own_program()
    for path in (program, Path(sys.base_prefix)):
        if _is_hidden(path.resolve()):
            raise SystemdError(
                f"{path} is in a home directory, which units can't see: install Swarm into /opt or /usr/local, with a "
                "Python of the system, or use --user"
            )
    return program


def image_program(root: Path) -> tuple[Path, str]:
    """Return the ``swarm`` program in an image, and the remaining step for the user.

    The Python of this machine is irrelevant for it.
    """
    ours = Path(sys.executable).parent / "swarm"
    places = [place for place in (ours, *map(Path, _USUAL)) if not _is_hidden(place)]
    found = next((place for place in places if os.path.lexists(_path_in_image(root, place))), None)
    if found is None:
        place = _check_path(places[0])
        return place, f"there is no swarm in {root} yet: install the package there, as {place}, which the units start"
    python = _read_interpreter(_path_in_image(root, found))
    if python and _is_hidden(Path(python)):
        raise SystemdError(
            f"{found} in {root} runs by {python}, in a home directory, which the units can't see: install Swarm there "
            "with a Python of the system"
        )
    return _check_path(found), ""


def _is_hidden(path: Path) -> bool:
    return any(path.is_relative_to(home) for home in _HIDDEN)


def _path_in_image(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _read_interpreter(program: Path) -> str:
    """Return a script's interpreter; empty if it has none."""
    try:
        with program.open("rb") as script:
            first = script.readline(_SHEBANG_BYTES)
    except OSError:  # a link that is valid only inside the image
        return ""
    return first[2:].decode(errors="replace").strip() if first.startswith(b"#!") else ""


def _check_path(program: Path) -> Path:
    if set(str(program)) & _FORBIDDEN_CHARACTERS:
        raise SystemdError(
            f"systemd starts no program with quotes or backslashes in its path: install elsewhere than {program}"
        )
    return program
