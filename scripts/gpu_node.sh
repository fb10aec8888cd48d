#!/usr/bin/env bash
# Starts a GPU node for tools that run elsewhere with --on, or checks one: gpu_node.sh [--host IP] [--check ADDRESS]; --help says more.
set -euo pipefail
bundle=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
exec "$("$bundle/scripts/python.sh")" "$bundle/tools/gpu_node.py" "$@"
