"""What pip installs is as good as what is built in place: the kernels in C are there and used, or it is told why not.

Each installation is made from a copy of the checkout, in a folder with a long name full of spaces and odd characters,
and is tried from another folder, so that nothing of the checkout can be imported by accident.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarm.stage import native
from swarm.stage.native.sources import digest, sources

REPOSITORY = Path(__file__).parents[2]
NATIVE = Path("swarm/stage/native")
ODD = "a folder with a long name, spaces, ümläuts & 'quotes' (and more) " + 80 * "x"
NO_COMPILER = shutil.which("cc") is None

needs_compiler = pytest.mark.skipif(NO_COMPILER, reason="no C compiler")

TRY = """
import json, torch
from swarm.stage import native
told = {"file": native.__file__, "built": native.open_library()[0] is not None, "reason": native.unavailable_reason()}
if native.library() is not None:
    from swarm.stage.native.linears import NativeLinear
    torch.manual_seed(1)
    weight, rows = torch.randn(64, 32).bfloat16(), torch.randn(3, 32).bfloat16()
    right = rows.float() @ weight.float().T
    told["off"] = float((NativeLinear(weight, None)(rows).float() - right).abs().max() / right.abs().max())
print(json.dumps(told))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the package is made of, with nothing built in it."""
    made = tmp_path / ODD
    shutil.copytree(
        REPOSITORY / "swarm", made / "swarm", ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, made)
    return made


def ran(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command, which must not fail; return its complaints, then its output."""
    done = subprocess.run(
        [str(each) for each in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | environment,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stderr + done.stdout


def wheel_of(source: Path, into: Path, **environment: str) -> tuple[Path, str]:
    """The wheel of a project or of a source distribution, and what was said while it was built."""
    said = ran(
        *(sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-index", "--no-build-isolation", "-w", into),
        source,
        cwd=into.parent,
        **environment,
    )
    (wheel,) = into.glob("*.whl")
    return wheel, said


def by_way_of_an_sdist(checkout: Path) -> Path:
    code = "import sys, setuptools.build_meta as build; build.build_sdist(sys.argv[1])"
    ran(sys.executable, "-c", code, checkout.parent / "sdist", cwd=checkout)
    (made,) = (checkout.parent / "sdist").glob("*.tar.gz")
    return made


def in_a_fresh_environment(wheel: Path, folder: Path) -> tuple[Path, Path]:
    """A Python that has the wheel, and our other packages by a path; and where its packages are."""
    venv.create(folder, with_pip=False)
    python = folder / "bin/python"
    ran(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel),
        cwd=wheel.parent,
    )
    (packages,) = folder.glob("lib/python*/site-packages")
    others = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "others.pth").write_text("\n".join(others))  # a path alone: editable packages there stay unknown here
    return python, packages


def tried(python: Path, packages: Path, cwd: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(ran(python, "-c", TRY, cwd=cwd).splitlines()[-1])
    assert Path(told["file"]).is_relative_to(packages)
    return told


def quick_compiler(folder: Path) -> str:
    """A compiler that optimizes less: all variants take it half of the time."""
    path = folder / "quick-cc"
    path.write_text('#!/bin/bash\nexec cc "${@/#-O3/-O1}"\n')
    path.chmod(0o755)
    return str(path)


# A wheel straight from the checkout is also built by the tests below, with little C in it. The long one compiles as
# users do, and so does the installation of the environment that runs these tests.
@needs_compiler
@pytest.mark.parametrize(
    "form", [pytest.param(Path, marks=pytest.mark.long), by_way_of_an_sdist], ids=["wheel", "sdist"]
)
def test_an_installed_package_uses_its_kernels(form: Callable[[Path], Path], checkout: Path, tmp_path: Path) -> None:
    """As the checkout does, and all sources compile without a warning. Control: with another source beside it, the
    library is not used, and the reason is told."""
    compiler = "cc" if form is Path else quick_compiler(tmp_path)
    wheel, said = wheel_of(form(checkout), tmp_path / "wheels", CFLAGS="-Wall -Wextra -Werror", CC=compiler)
    assert "left out" not in said
    assert "-Werror" in said
    python, packages = in_a_fresh_environment(wheel, tmp_path / "an environment")
    assert (packages / "swarm" / "gateway" / "console" / "page" / "index.html").is_file()  # files that are no code
    assert (packages / "swarm" / "systemd" / "units" / "swarm-broker.socket").is_file()
    told = tried(python, packages, tmp_path)
    assert told["built"]
    assert told["reason"] == native.unavailable_reason()  # the processor's, if anything
    assert told.get("off", 0.0) < 1e-2
    (packages / NATIVE / "module.c").write_text("/* from elsewhere */\n")
    told = tried(python, packages, tmp_path)
    assert not told["built"]
    assert "was built from other sources" in told["reason"]


@pytest.mark.parametrize("compiler", [pytest.param("/nonexistent/cc", marks=pytest.mark.long), "false"])
def test_without_a_compiler_it_is_installed_all_the_same(compiler: str, checkout: Path, tmp_path: Path) -> None:
    """Without the library, and it is told what was lacking."""
    wheel, _ = wheel_of(checkout, tmp_path / "wheels", CC=compiler)
    packages = unpacked(wheel, tmp_path)
    code = "from swarm.stage import native; print(native.__file__); print(native.unavailable_reason())"
    file, absence = ran(sys.executable, "-c", code, cwd=packages).splitlines()[-2:]
    assert Path(file).is_relative_to(packages)
    assert "install Swarm where there is a C compiler" in absence


@needs_compiler
def test_a_variant_that_the_compiler_refuses_is_left_out(small: Path, tmp_path: Path) -> None:
    """The others are built, and told by a macro each which there are. A compiler that knows all leaves nothing out."""
    fussy = tmp_path / "fussy"
    fussy.write_text(
        '#!/bin/sh\ncase "$*" in *variants/amx.c*) echo "amx? never heard" >&2; exit 1;; esac\nexec cc "$@"\n'
    )
    fussy.chmod(0o755)
    wheel, said = wheel_of(small, tmp_path / "first", CC=str(fussy))
    assert "variants/amx.c is left out" in said
    assert library(unpacked(wheel, tmp_path / "first")).which() == 2
    wheel, said = wheel_of(small, tmp_path / "second")
    assert "left out" not in said
    assert library(unpacked(wheel, tmp_path / "second")).which() == 3


@needs_compiler
def test_an_older_build_leaves_no_trace(small: Path, tmp_path: Path) -> None:
    """Sources are never packed, since old ones may lie in the build's folder; and a library that is newer than a source
    is built again all the same."""
    wheel_of(small, tmp_path / "first")
    (built,) = small.glob("build/lib*")
    (built / NATIVE / "gone.c").write_text("/* a source of an older version */\n")
    with (small / NATIVE / "module.c").open("a") as source:
        source.write("int added(void) { return 7; }\n")
    os.utime(small / NATIVE / "module.c", (1, 1))
    wheel, _ = wheel_of(small, tmp_path / "second")
    packages = unpacked(wheel, tmp_path / "second")
    assert not sources(packages / NATIVE)
    assert library(packages).added() == 7
    assert made_from(packages) == digest(small / NATIVE)


@pytest.fixture
def small(checkout: Path) -> Path:
    """The package with hardly any C in it: what all libraries have, a header in a folder, and two variants."""
    folder = checkout / NATIVE
    for path in [*folder.rglob("*.[ch]")]:
        if path.name != "module.c":
            path.unlink()
    for name in ("simd", "variants"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "simd/width.h").write_text("#define WIDTH 4\n")
    for name in ("amx", "portable"):
        (folder / f"variants/{name}.c").write_text(f'#include "simd/width.h"\nint {name}(void) {{ return WIDTH; }}\n')
    (folder / "module.c").write_text(
        "const char *swarm_native_sources(void) { return SWARM_NATIVE_SOURCES; }\n"
        "int which(void) {\n  int found = 0;\n"
        "#ifdef SWARM_HAS_AMX\n  int amx(void);\n  found += amx() / 4;\n#endif\n"
        "#ifdef SWARM_HAS_PORTABLE\n  int portable(void);\n  found += portable() / 2;\n#endif\n"
        "  return found;\n}\n"
    )
    return checkout


def unpacked(wheel: Path, folder: Path) -> Path:
    zipfile.ZipFile(wheel).extractall(folder / "packages")
    return folder / "packages"


def library(packages: Path) -> ctypes.CDLL:
    (path,) = (packages / NATIVE).glob("_native*")
    return ctypes.CDLL(str(path))


def made_from(packages: Path) -> str:
    function = library(packages).swarm_native_sources
    function.restype = ctypes.c_char_p
    return str(function().decode())
