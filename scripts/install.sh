#!/usr/bin/env bash
# Puts the skills where a client looks for them, or takes them away: install.sh --client NAME [options]; --help lists them.
set -euo pipefail
bundle=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
python=$("$bundle/scripts/python.sh")
exec "$python" "$bundle/scripts/install.py" "$@"
