#!/usr/bin/env bash
# Makes the Python environment that the tools need; idempotent. Prints the Python to use.
#   bash scripts/setup.sh            what the tools need
#   bash scripts/setup.sh test checks    also these groups of pyproject.toml: test checks distributed formats nvcc; what cannot be had is named
#   bash scripts/setup.sh oldest     a separate environment, .venv-oldest, with the oldest supported versions, for the tests
# The environment lies in ${XDG_CACHE_HOME:-~/.cache}/gpu-kernel-optimizer. KERNELOPT_VENV names another folder, here and for all tools;
# a .venv in the bundle is used where there is one. An importable torch (of $PYTHON, default python3) is used and never replaced; else
# one is chosen that fits GPU and driver (reference/torch_builds.json).
# With no network: pip's own PIP_FIND_LINKS and PIP_NO_INDEX name a folder of wheels.
set -euo pipefail
bundle=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
host=${PYTHON:-python3}

for group in "$@"; do
  case $group in
    test | checks | distributed | formats | nvcc) ;;
    oldest) [ $# -eq 1 ] || { echo "setup: oldest is an environment of its own; name no other group beside it" >&2; exit 2; } ;;
    -h | --help) sed -n '2,10s/^# //p' "$0"; exit 0 ;;
    *) echo "setup: there is no group $group; groups: test checks distributed formats nvcc oldest" >&2; exit 2 ;;
  esac
done

say() { echo "setup: $*" >&2; }

command -v "$host" >/dev/null || { say "$host is not installed; install Python 3.10 or newer"; exit 3; }
"$host" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { say "$host is older than 3.10; set PYTHON to a newer one"; exit 3; }
if [ "$*" = oldest ]; then
  venv=$(realpath -m "${KERNELOPT_VENV:-$bundle/.venv-oldest}")
else
  venv=$(PYTHONPATH=$bundle/tools "$host" -m kernelopt.environment)
fi

make_environment() {
  local options=()
  if [ "$1" != oldest ] && "$host" -c 'import torch' 2>/dev/null; then
    say "using the torch of $host"
    options=(--system-site-packages)
  fi
  if [ -n "$(ls -A "$venv" 2>/dev/null)" ] && [ ! -f "$venv/pyvenv.cfg" ]; then
    say "$venv is no environment of Python; set KERNELOPT_VENV to an empty folder or a new one"
    exit 2
  fi
  say "making the environment $venv"
  rm -rf "$venv"
  "$host" -m venv "${options[@]}" "$venv" 2>/dev/null || "$host" -m venv --without-pip "${options[@]}" "$venv"
  if [ ${#options[@]} -gt 0 ]; then # a host that is an environment itself is not reached by --system-site-packages
    "$host" -c 'import site; print("\n".join(site.getsitepackages()))' \
      >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/host.pth"
  fi
}

install() { # groups: pip installs what is absent of them; 1 when that fails, 3 when nothing would help and it was said why
  local listed pip=("$venv/bin/python" -m pip)
  listed=$("$venv/bin/python" "$bundle/scripts/requirements.py" "$@") || return $?
  mapfile -t wanted <<<"$listed"
  "$venv/bin/python" -c 'import pip' 2>/dev/null || pip=("$host" -m pip --python "$venv/bin/python")
  "${pip[@]}" install --disable-pip-version-check --retries 2 "${wanted[@]}" 2>&1 | { grep -vE '^(Requirement already satisfied|Looking in)' >&2 || true; }
}

install_needed() { # group: without it nothing runs
  install "$1" && return
  [ $? -eq 3 ] || say "could not install ${wanted[*]}: the tools cannot run without them; with no network, put wheels of them and of what they need into a folder and set PIP_FIND_LINKS=FOLDER PIP_NO_INDEX=1; in an agent's sandbox ask the user to run it outside"
  exit 3
}

parent=${venv%/*}
mkdir -p "$parent" 2>/dev/null || true
{ exec 9<"$parent" && flock 9; } 2>/dev/null || true # one set-up at a time: several agents may share the folder
if ! "$venv/bin/python" -c '' 2>/dev/null; then
  [ -w "$parent" ] || {
    say "no environment can be made in $parent, which is absent or read-only: set KERNELOPT_VENV to a folder of yours, for this and for the tools; in an agent's sandbox ask the user to run it outside"
    exit 3
  }
  make_environment "${1:-}"
fi
code=0
if [ "$*" = oldest ]; then
  install_needed oldest
else
  install dependencies profile "$@" || code=$? # in one call, which is quick where all is there
fi
[ $code -ne 3 ] || exit 3
if [ $code -ne 0 ]; then # one after the other, as far as they can be had
  install_needed dependencies
  install profile || say "no ncu-report: .ncu-rep files are read with the copy beside an installed Nsight Compute"
  for group in "$@"; do
    install "$group" || say "group $group is not complete"
  done
fi
# Where torch lies without byte code, each command would compile it anew. It says itself why none can be kept.
[ "$*" = oldest ] || PYTHONPATH=$bundle/tools "$venv/bin/python" -m kernelopt.byte_code || true
echo "$venv/bin/python"
