#!/usr/bin/env bash
# The whole way on a shipped kernel: a naive row softmax, and a better one. bash scripts/demo.sh [--root DIR]
# With a GPU everything is measured; without one it says what is interpreted, what is recorded and what is refused.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
python=$(bash "$here/setup.sh")
exec "$python" "$here/demo.py" "$@"
