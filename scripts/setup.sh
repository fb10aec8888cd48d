#!/usr/bin/env bash
# Makes .venv with what the tools need; idempotent. Prints the Python to use.
#   bash scripts/setup.sh            what the tools need
#   bash scripts/setup.sh test checks    also these groups of pyproject.toml (test checks distributed plots), as far as they can be had
# An importable torch (of $PYTHON, default python3) is used and never replaced. With no network: pip's own
# PIP_FIND_LINKS and PIP_NO_INDEX name a folder of wheels.
set -euo pipefail
bundle=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
venv="$bundle/.venv"
host=${PYTHON:-python3}

for group in "$@"; do
  case $group in
    test | checks | distributed | plots) ;;
    -h | --help) sed -n '2,6s/^# //p' "$0"; exit 0 ;;
    *) echo "setup: there is no group $group; groups: test checks distributed plots" >&2; exit 2 ;;
  esac
done

say() { echo "setup: $*" >&2; }

command -v "$host" >/dev/null || { say "$host is not installed; install Python 3.10 or newer"; exit 3; }
"$host" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { say "$host is older than 3.10; set PYTHON to a newer one"; exit 3; }

make_environment() {
  local options=()
  if "$host" -c 'import torch' 2>/dev/null; then
    say "using the torch of $host"
    options=(--system-site-packages)
  fi
  rm -rf "$venv"
  "$host" -m venv "${options[@]}" "$venv" 2>/dev/null || "$host" -m venv --without-pip "${options[@]}" "$venv"
  if [ ${#options[@]} -gt 0 ]; then # a host that is an environment itself is not reached by --system-site-packages
    "$host" -c 'import site; print("\n".join(site.getsitepackages()))' \
      >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/host.pth"
  fi
}

install() { # group: installs what is absent of it; 1 when that fails
  local listed wanted
  listed=$("$venv/bin/python" "$bundle/scripts/missing_packages.py" "$1") || return 1
  [ -n "$listed" ] || return 0
  mapfile -t wanted <<<"$listed"
  say "installing ${wanted[*]}"
  if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --retries 2 "${wanted[@]}" >&2
  else
    "$host" -m pip --python "$venv/bin/python" install --quiet --disable-pip-version-check --retries 2 "${wanted[@]}" >&2
  fi
}

"$venv/bin/python" -c '' 2>/dev/null || make_environment
install dependencies || { say "the tools cannot run without these packages; with no network, put wheels of them and of what they need into a folder and set PIP_FIND_LINKS=FOLDER PIP_NO_INDEX=1"; exit 3; }
install profile || say "no ncu-report: .ncu-rep files are read with the copy beside an installed Nsight Compute"
for group in "$@"; do
  install "$group" || say "group $group is not complete"
done
echo "$venv/bin/python"
