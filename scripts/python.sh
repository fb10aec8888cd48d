#!/usr/bin/env bash
# Prints the Python to run the tools with: that of the environment of scripts/setup.sh, if there is one, else python3.
set -euo pipefail
bundle=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
host=$(command -v python3) || { echo "python3 is not installed; install Python 3.10 or newer" >&2; exit 3; }
venv=$(PYTHONPATH=$bundle/tools "$host" -m kernelopt.environment 2>/dev/null || true)
if [ -n "$venv" ] && [ -x "$venv/bin/python" ]; then
  echo "$venv/bin/python"
else
  echo "$host"
fi
