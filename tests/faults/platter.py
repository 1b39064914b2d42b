"""A disk that fails to sync, as the kernel shows it: who asked is told once, and what was to be written stays readable
until the machine loses power. A library loaded before libc notes all that processes write; ``Platter`` knows from that
what is on the disk."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# ``PLATTER_FAILS``: "SUFFIX@N" fails the N-th sync of files whose names end so, and no other. ``PLATTER_FULL``: a file
# whose name ends so takes nothing more. The index of the write-ahead log is mapped, and of no use to another machine.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

struct head { char kind[8]; int64_t offset, path, data; };
static int notes = -1;

__attribute__((constructor)) static void begin(void) {
  notes = open(getenv("PLATTER_NOTES"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
}

static int ends(const char *path, const char *end) {
  size_t n = strlen(path), m = end ? strlen(end) : 0;
  return m && n >= m && !strcmp(path + n - m, end);
}

static int ours(const char *path) {
  const char *place = getenv("PLATTER_PLACE");
  return notes >= 0 && !strncmp(path, place, strlen(place)) && !ends(path, "-shm");
}

static int named(int file, char *path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t n = readlink(link, path, PATH_MAX - 1);
  path[n < 0 ? 0 : n] = 0;
  return n > 0 && ours(path);
}

static void note(const char *kind, const char *path, int64_t offset, const void *data, size_t size) {
  struct head head = {{0}, offset, strlen(path), size};
  strncpy(head.kind, kind, sizeof head.kind);
  struct iovec parts[] = {{&head, sizeof head}, {(void *)path, head.path}, {(void *)data, size}};
  if (writev(notes, parts, 3) < 0) abort();
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t offset) {
  char path[PATH_MAX];
  int is_ours = named(file, path);
  if (is_ours && ends(path, getenv("PLATTER_FULL"))) return errno = ENOSPC, -1;
  ssize_t n = syscall(SYS_pwrite64, file, data, size, offset);
  if (is_ours && n > 0) note("write", path, offset, data, n);
  return n;
}
ssize_t pwrite(int file, const void *data, size_t size, off_t offset) { return pwrite64(file, data, size, offset); }

ssize_t write(int file, const void *data, size_t size) {
  char path[PATH_MAX];
  ssize_t n = syscall(SYS_write, file, data, size);
  if (n > 0 && named(file, path)) note("write", path, lseek(file, 0, SEEK_CUR) - n, data, n);
  return n;
}

int ftruncate64(int file, off64_t size) {
  char path[PATH_MAX];
  int status = syscall(SYS_ftruncate, file, size);
  if (!status && named(file, path)) note("cut", path, size, "", 0);
  return status;
}
int ftruncate(int file, off_t size) { return ftruncate64(file, size); }

int fsync(int file) {
  static int count;
  char path[PATH_MAX], end[64] = "";
  int number = 0;
  if (!named(file, path)) return syscall(SYS_fsync, file);
  const char *fails = getenv("PLATTER_FAILS");
  if (fails) sscanf(fails, "%63[^@]@%d", end, &number);
  if (ends(path, end) && ++count == number) {
    note("lost", path, 0, "", 0);
    setenv("PLATTER_LOST", path, 1);
    return errno = EIO, -1;
  }
  note("sync", path, 0, "", 0);
  return 0;
}
int fdatasync(int file) { return fsync(file); }

int unlink(const char *path) {
  int status = syscall(SYS_unlink, path);
  if (!status && ours(path)) note("gone", path, 0, "", 0);
  return status;
}

int rename(const char *from, const char *to) {
  int status = syscall(SYS_rename, from, to);
  if (!status && ours(from)) note("moved", from, 0, to, strlen(to));
  return status;
}
"""


@dataclass
class Platter:
    """``place``: the directory that is on it. ``more``: a processes' environment."""

    place: Path
    notes: Path
    library: Path
    _disk: dict[str, bytearray] = field(default_factory=dict)
    _waiting: dict[str, list[tuple[str, int, bytes]]] = field(default_factory=dict)

    @classmethod
    def made(cls, directory: Path, place: Path) -> Platter:
        source, library = directory / "platter.c", directory / "platter.so"
        source.write_text(SHIM)
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        return cls(place, directory / "notes", library)

    def environment(self, *, fails: str = "", full: str = "") -> dict[str, str]:
        return {
            **os.environ,
            "LD_PRELOAD": str(self.library),
            "PLATTER_NOTES": str(self.notes),
            "PLATTER_PLACE": f"{self.place}/",
            **({"PLATTER_FAILS": fails} if fails else {}),
            **({"PLATTER_FULL": full} if full else {}),
        }

    @property
    def losses(self) -> int:
        """Syncs that failed."""
        return sum(kind == "lost" for kind, *_ in self._read())

    def power_cut(self, to: Path) -> None:
        """Copy what is on the disk: whatever was synced, and nothing else of what was written."""
        for kind, path, offset, data in self._read():
            self._happened(kind, path, offset, data)
        for path, content in self._disk.items():
            there = to / Path(path).relative_to(self.place)
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(content)

    def _happened(self, kind: str, path: str, offset: int, data: bytes) -> None:
        waiting = self._waiting.setdefault(path, [])
        match kind:
            case "write" | "cut":
                waiting.append((kind, offset, data))
            case "lost":
                waiting.clear()
            case "sync":
                for how, place, what in waiting:
                    self._put(self._disk.setdefault(path, bytearray()), how, place, what)
                waiting.clear()
            case "gone":
                self._disk.pop(path, None)
                del self._waiting[path]
            case "moved":
                for each in [*self._disk]:
                    if each == path or each.startswith(f"{path}/"):
                        self._disk[data.decode() + each[len(path) :]] = self._disk.pop(each)
                for each in [*self._waiting]:
                    if each == path or each.startswith(f"{path}/"):
                        self._waiting[data.decode() + each[len(path) :]] = self._waiting.pop(each)

    def _put(self, content: bytearray, how: str, offset: int, data: bytes) -> None:
        if how == "cut":
            content[:] = content[:offset].ljust(offset, b"\0")
            return
        content[len(content) :] = bytes(max(0, offset - len(content)))
        content[offset : offset + len(data)] = data

    def _read(self) -> Iterator[tuple[str, str, int, bytes]]:
        head = struct.Struct("8sqqq")
        with self.notes.open("rb") as file:
            while start := file.read(head.size):
                kind, offset, path, data = head.unpack(start)
                yield kind.rstrip(b"\0").decode(), file.read(path).decode(), offset, file.read(data)
