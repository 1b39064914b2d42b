"""Build of the library of our C kernels. setuptools loads this file by itself, before anything is installed.

* All C files in this folder are built; there is no list to maintain. The digest of all of them is compiled in, so that
  a library is never used with other sources than its own.
* Each ``variants/NAME.c`` holds the kernels for one kind of processor. A variant that this compiler can't compile is
  left out with a warning. For each variant that was built, the other files are compiled with a macro
  ``SWARM_HAS_NAME``.
* Without a compiler there is no library, and Swarm is installed nevertheless: the extension is optional.
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

# setuptools requires paths relative to the project, which is its working directory
_FOLDER = Path("swarm/stage/native")
_SOURCES = runpy.run_path(str(Path(__file__).with_name("sources.py")))


class BuildNative(build_ext):
    """Build command that compiles all C files in the folder, instead of the one file named in pyproject.toml."""

    def finalize_options(self) -> None:
        """Find the files. A source distribution takes its list of files from here, too."""
        super().finalize_options()
        self.force = True  # file dates do not show which sources an older build used
        found = [path.as_posix() for path in _SOURCES["sources"](_FOLDER)]
        for extension in self.extensions:
            extension.include_dirs = [_FOLDER.as_posix()]
            extension.sources = [path for path in found if path.endswith(".c") and not _is_variant(path)]
            extension.depends = [path for path in found if path not in extension.sources]

    def run(self) -> None:
        """Build, and remove the sources from the packed files.

        Copies of them may differ from the library's sources, and a library with other sources next to it would not be
        used. A library without sources is used.
        """
        super().run()
        originals = {path.resolve() for path in _SOURCES["sources"](_FOLDER)}
        for copy in _SOURCES["sources"](self.build_lib / _FOLDER):
            if copy.resolve() not in originals:
                copy.unlink()

    def build_extension(self, ext: Extension) -> None:
        """Build the variants first, because the other files are compiled with the list of variants."""
        variants = [path for path in ext.depends if _is_variant(path)]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = list(threads.map(partial(self._compile_variant, ext), variants))
        for path, made in zip(variants, objects, strict=True):
            if made:
                ext.extra_objects += made
                ext.define_macros.append((f"SWARM_HAS_{Path(path).stem.upper()}", "1"))
            else:
                self.warn(f"{path} is left out: this compiler can't compile it; see its messages above")
        ext.define_macros.append(("SWARM_NATIVE_SOURCES", f'"{_SOURCES["digest"](_FOLDER)}"'))
        super().build_extension(ext)

    def _compile_variant(self, ext: Extension, path: str) -> list[str]:
        """Compile one variant to an object file; return an empty list if the compiler fails."""
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
