#!/usr/bin/env bash
# Checks and tests of this repository: bash scripts/test.sh [pytest arguments]
# A check whose tool cannot be installed is named and skipped, but under CI=true it fails.
# With -m gpu the tests run one after the other: they share the GPU's lock.
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." || exit 3
case " $* " in *" -h "* | *" --help "*) sed -n '2,4s/^# //p' scripts/test.sh; exit 0 ;; esac
python=$(bash scripts/setup.sh test checks) || exit 3
PATH=$(dirname "$python"):$PATH # programs of the environment that setup.sh built upon are found too
failed=()
skipped=()

check() { # name, program, arguments…
  local name=$1 program=$2
  shift 2
  if ! command -v "$program" >/dev/null; then
    skipped+=("$name")
    return
  fi
  echo "== $name"
  "$program" "$@" || failed+=("$name")
}

check "ruff check" ruff check .
check "ruff format" ruff format --check .
check "shellcheck" shellcheck scripts/*.sh reference/*.sh tools/*.sh .ci/run
PYTHONPATH=tools check "layers (import-linter)" lint-imports --no-cache
if agentskills=$(command -v agentskills); then
  echo "== skills-ref"
  bash scripts/validate_skills.sh "$agentskills" || failed+=("skills-ref")
else
  skipped+=("skills-ref")
fi

workers=$(($(nproc) * 3 / 2)) # more than cores, for tests that wait
case " $* " in *" -m gpu "*) workers=0 ;; esac
echo "== pytest"
"$python" -m pytest -q -n "$workers" --dist worksteal "$@" || failed+=("pytest")

[ ${#skipped[@]} -eq 0 ] || echo "NOT RUN, their tools could not be installed: ${skipped[*]}"
[ ${#failed[@]} -eq 0 ] || { echo "FAILED: ${failed[*]}"; exit 1; }
[ ${#skipped[@]} -eq 0 ] || [ "${CI:-}" != true ] || exit 1
