#!/usr/bin/env bash
# Locks the GPU's SM clock, for good or while a command runs: lock-gpu-clock.sh [--clock MHZ] [-- COMMAND...]; --help says more.
set -euo pipefail
bundle=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
exec "$("$bundle/scripts/python.sh")" "$bundle/tools/lock_gpu_clock.py" lock "$@"
