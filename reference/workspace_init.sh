#!/usr/bin/env bash
# Starts a session: bash reference/workspace_init.sh NAME KERNEL [options]; --help lists them. Prints the workspace's path.
set -euo pipefail
bundle=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
exec "$("$bundle/scripts/python.sh")" "$bundle/tools/init_workspace.py" "$@"
