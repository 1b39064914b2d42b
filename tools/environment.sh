# Sourced by the tools: makes the virtual environment `.venv` in the repository, or reuses the one that is there.
# Needs Python 3.11 or newer with its venv module, and nothing else. bash 3.2 suffices.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
VENV=$PWD/.venv
STAMP=$VENV/installed # what the environment was made from; written last, so a broken installation is done again

say() { printf '%s\n' "$*"; }

fail() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# The first Python that is new enough, whatever it is called. PYTHON=… chooses another.
find_python() {
  local name
  for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14 python}; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  return 1
}

# make_environment EXTRA: install this repository with the extra `all` or `dev`, pinned, for editing.
make_environment() {
  local extra=$1 python wanted started=$SECONDS
  python=$(find_python) || fail "Python 3.11 or newer is needed; install it, or name it with PYTHON=/path/to/python"
  wanted=$("$python" -c 'import hashlib, pathlib
native = pathlib.Path("swarm/stage/native")
files = ["pyproject.toml", "constraints.txt", *map(native.joinpath, ("build.py", "sources.py")), *sorted(native.rglob("*.[ch]"))]
print(hashlib.sha256(b"".join(pathlib.Path(file).read_bytes() for file in files)).hexdigest())') ||
    fail "pyproject.toml, constraints.txt or the kernels' sources can't be read"
  if "$VENV/bin/python" -c '' 2>/dev/null && grep -qsxE "$wanted ($extra|dev)" "$STAMP"; then
    return # the development extra contains the others
  fi
  if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    say "making the environment $VENV with $python"
    "$python" -m venv --clear "$VENV" ||
      fail "$python can't make a virtual environment; on Debian and Ubuntu, install python3-venv"
  fi
  say "installing swarm-llm[$extra] and what it needs (the first time takes minutes)"
  rm -f "$STAMP"
  "$VENV/bin/python" -m pip install --no-input --disable-pip-version-check \
    --editable ".[$extra]" --constraint constraints.txt || fail "the installation failed; pip says why above"
  printf '%s %s\n' "$wanted" "$extra" >"$STAMP"
  say "the environment is ready after $((SECONDS - started)) s"
}
