"""Builds the library of our kernels in C. setuptools loads this file by itself, before anything is installed.

* What lies in this folder is what is built: there is no list to keep. The digest of all of it is compiled in, so that a
  library is never used beside other sources than its own.
* Each ``variants/NAME.c`` holds the kernels for one kind of processor. One that this compiler can't compile is left out
  and named; of those that were built, the other files learn by a macro each: ``SWARM_HAS_NAME``.
* Without a compiler there is no library, and Swarm is installed all the same: the extension is optional.
"""

from __future__ import annotations

import os
import runpy
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

_FOLDER = Path("swarm/stage/native")  # setuptools wants paths relative to the project, where it works
_SOURCES = runpy.run_path(str(Path(__file__).with_name("sources.py")))


class BuildNative(build_ext):
    """Builds whatever C is in the folder, instead of the one file that pyproject.toml has to name."""

    def finalize_options(self) -> None:
        """Find the files. A source distribution takes what it contains from here, too."""
        super().finalize_options()
        self.force = True  # dates don't tell what an older build was made of
        found = [path.as_posix() for path in _SOURCES["sources"](_FOLDER)]
        for extension in self.extensions:
            extension.include_dirs = [_FOLDER.as_posix()]
            extension.sources = [path for path in found if path.endswith(".c") and not _is_variant(path)]
            extension.depends = [path for path in found if path not in extension.sources]

    def run(self) -> None:
        """Build, and take the sources out of what will be packed. Copies there may be of another day than the library,
        which would not be used beside them; and nobody needs them: a library alone is used."""
        super().run()
        originals = {path.resolve() for path in _SOURCES["sources"](_FOLDER)}
        for copy in _SOURCES["sources"](self.build_lib / _FOLDER):
            if copy.resolve() not in originals:
                copy.unlink()

    def build_extension(self, ext: Extension) -> None:
        """The variants first: the others are told what became of them."""
        variants = [path for path in ext.depends if _is_variant(path)]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = list(threads.map(partial(self._compile_variant, ext), variants))
        for path, made in zip(variants, objects, strict=True):
            if made:
                ext.extra_objects += made
                ext.define_macros.append((f"SWARM_HAS_{Path(path).stem.upper()}", "1"))
            else:
                self.warn(f"{path} is left out: this compiler can't compile it; see what it says above")
        ext.define_macros.append(("SWARM_NATIVE_SOURCES", f'"{_SOURCES["digest"](_FOLDER)}"'))
        super().build_extension(ext)

    def _compile_variant(self, ext: Extension, path: str) -> list[str]:
        """Compile one variant to an object file; None where the compiler refuses it."""
        try:
            objects: list[str] = self.compiler.compile(
                [path],
                output_dir=self.build_temp,
                include_dirs=ext.include_dirs,
                debug=self.debug,
                extra_postargs=ext.extra_compile_args,
            )
        except CompileError:
            return []
        return objects


def _is_variant(path: str) -> bool:
    return path.endswith(".c") and Path(path).parent.name == _SOURCES["VARIANTS"]
