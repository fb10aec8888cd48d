#!/usr/bin/env bash
# Prints the Python to run the tools with: the environment that scripts/setup.sh made, if there is one, else python3.
set -euo pipefail
bundle=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
venv=${KERNELOPT_VENV:-$bundle/.venv}
if [ -x "$venv/bin/python" ]; then
  echo "$venv/bin/python"
elif command -v python3 >/dev/null; then
  command -v python3
else
  echo "python3 is not installed; install Python 3.10 or newer" >&2
  exit 3
fi
