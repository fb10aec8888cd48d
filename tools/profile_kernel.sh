#!/usr/bin/env bash
# Profiles one call of a workspace's kernel: profile_kernel.sh --workspace W --version vN; --help lists the options.
set -euo pipefail
bundle=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
exec "$("$bundle/scripts/python.sh")" "$bundle/tools/profile_kernel.py" "$@"
