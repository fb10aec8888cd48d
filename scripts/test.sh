#!/usr/bin/env bash
# Checks and tests of this repository: bash scripts/test.sh [--oldest] [--record] [pytest arguments]
# A check whose tool cannot be installed is named and skipped, but under CI=true it fails.
# With -m gpu the tests run one after the other: they share the GPU's lock.
# --oldest runs the tests alone, with the oldest torch and triton that are supported (.venv-oldest, without a GPU; PYTHON names
# its Python, python3.10 where there is one). --record writes what came of the tests into docs/tested-with.md.
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." || exit 3

arguments=() oldest='' record=''
for argument in "$@"; do
  case $argument in
    -h | --help) sed -n '2,6s/^# //p' scripts/test.sh; exit 0 ;;
    --oldest) oldest=1 ;;
    --record) record=1 ;;
    *) arguments+=("$argument") ;;
  esac
done
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

all_checks() {
  check "ruff check" ruff check .
  check "ruff format" ruff format --check .
  check "shellcheck" shellcheck scripts/*.sh reference/*.sh tools/*.sh .ci/run
  PYTHONPATH=tools check "layers (import-linter)" lint-imports --no-cache
  local agentskills
  if agentskills=$(command -v agentskills); then
    echo "== skills-ref"
    bash scripts/validate_skills.sh "$agentskills" || failed+=("skills-ref")
  else
    skipped+=("skills-ref")
  fi
}

if [ -n "$oldest" ]; then
  if [ -z "${PYTHON:-}" ]; then PYTHON=$(python3.10 -c '' 2>/dev/null && echo python3.10 || echo python3); fi
  export PYTHON KERNELOPT_VENV="$PWD/.venv-oldest" CUDA_VISIBLE_DEVICES=-1
  python=$(bash scripts/setup.sh oldest) || exit 3
  PATH=$(dirname "$python"):$PATH
else
  export KERNELOPT_VENV="${KERNELOPT_VENV:-$PWD/.venv}" # a clone is for its developer: all stays in it
  python=$(bash scripts/setup.sh test checks) || exit 3
  PATH=$(dirname "$python"):$PATH # programs of the environment that setup.sh built upon are found too
  all_checks
fi

unset PYTHONDONTWRITEBYTECODE # or hundreds of processes would each compile the tools anew
workers=$(($(nproc) * 3 / 2)) # more than cores, for tests that wait
case " ${arguments[*]} " in *" -m gpu"*) workers=0 ;; esac
echo "== pytest"
result=$(mktemp)
"$python" -m pytest -q -n "$workers" --dist worksteal --junitxml "$result" "${arguments[@]}" || failed+=("pytest")
command="bash scripts/test.sh ${oldest:+--oldest }${arguments[*]}"
[ -z "$record" ] || "$python" scripts/tested_with.py "$result" "${command% }" || failed+=("record")
rm -f "$result"

[ ${#skipped[@]} -eq 0 ] || echo "NOT RUN, their tools could not be installed: ${skipped[*]}"
[ ${#failed[@]} -eq 0 ] || { echo "FAILED: ${failed[*]}"; exit 1; }
[ ${#skipped[@]} -eq 0 ] || [ "${CI:-}" != true ] || exit 1
