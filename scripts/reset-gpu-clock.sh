#!/usr/bin/env bash
# Gives back the SM clock that lock-gpu-clock.sh took; without such a lock it changes nothing.
set -euo pipefail
bundle=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
exec "$("$bundle/scripts/python.sh")" "$bundle/tools/lock_gpu_clock.py" reset "$@"
