#!/usr/bin/env bash
# Checks and tests of this repository: bash scripts/test.sh [--oldest | --clients[=latest]] [--record] [pytest arguments]
# A check whose tool cannot be installed is named and skipped, but under CI=true it fails.
# With -m gpu, tests that measure no time run at once, up to 16; then the others run one after the other. --on-gpu at-once
# and --on-gpu alone run one of these parts.
# --oldest runs the tests alone, with the oldest torch and triton that are supported (.venv-oldest, without a GPU; PYTHON names
# its Python, python3.10 where there is one). --record writes what came of the tests into docs/tested-with.md.
# --clients runs tests/clients alone: it installs Claude Code, Codex, Gemini CLI and OpenCode into .clients with npm, at the
# versions of tests/clients/package.json or the latest. Without arguments, the usual run has two of these tests, of Codex.
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." || exit 3

arguments=() oldest='' record='' clients=''
for argument in "$@"; do
  case $argument in
    -h | --help) sed -n '2,9s/^# //p' scripts/test.sh; exit 0 ;;
    --oldest) oldest=1 ;;
    --clients) clients=pinned ;;
    --clients=latest) clients=latest ;;
    --record) record=1 ;;
    *) arguments+=("$argument") ;;
  esac
done
failed=()
skipped=()
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT

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

install_clients() { # pinned or latest, names of packages (all without one): into .clients, whose home is npm's too
  local wanted options=(--prefix .clients --no-audit --no-fund --no-package-lock --loglevel=error)
  wanted=$("$python" tests/clients/packages.py "$@") && mkdir -p .clients/home || return
  # shellcheck disable=SC2086  # one word a package
  env npm_config_userconfig="$HOME/.npmrc" HOME="$PWD/.clients/home" npm install "${options[@]}" $wanted
}

test_clients() { # pytest arguments: where there are rights for it, with loopback alone
  local alone=(unshare --net)
  [ "$(id -u)" -eq 0 ] || alone+=(--map-root-user)
  if "${alone[@]}" true 2>/dev/null; then
    alone+=("$python" tests/clients/isolated.py)
  else
    alone=(env)
    echo "no network namespace can be made here: proxies refuse what does not go to loopback"
  fi
  "${alone[@]}" "$python" -m pytest -q -m clients -n 0 "$@"
}

codex_tests() {
  echo "== Codex, the cheapest of the clients"
  if ! command -v npm >/dev/null || ! install_clients pinned @openai/codex; then
    echo "NOT RUN: npm is not there, or cannot install Codex"
    return
  fi
  test_clients tests/clients/test_codex_sandbox.py::test_a_kernel_is_verified_inside \
    "tests/clients/test_loop.py::test_two_rounds_are_accepted_with_the_command_line_that_the_loop_knows[codex]"
}

unset PYTHONDONTWRITEBYTECODE # or hundreds of processes would each compile the tools anew
if [ -n "$oldest" ]; then
  if [ -z "${PYTHON:-}" ]; then PYTHON=$(python3.10 -c '' 2>/dev/null && echo python3.10 || echo python3); fi
  export PYTHON KERNELOPT_VENV="$PWD/.venv-oldest" CUDA_VISIBLE_DEVICES=-1
  python=$(bash scripts/setup.sh oldest) || exit 3
  PATH=$(dirname "$python"):$PATH
else
  export KERNELOPT_VENV="${KERNELOPT_VENV:-$PWD/.venv}" # a clone is for its developer: all stays in it
  python=$(bash scripts/setup.sh test checks) || exit 3
  PATH=$(dirname "$python"):$PATH # programs of the environment that setup.sh built upon are found too
  if [ -z "$clients" ]; then
    # All tests are compiled while the checks run, once for all workers.
    [ -n "${arguments[*]}" ] || "$python" -m pytest -q --collect-only >/dev/null 2>&1 &
    all_checks
    wait
  fi
fi

if [ -n "$clients" ]; then
  command -v npm >/dev/null || { echo "npm is not installed; the clients come from its registry (Node.js 20 or newer)"; exit 3; }
  install_clients "$clients" || exit 3
  test_clients "${arguments[@]:-tests/clients}"
  exit
fi

run_tests() { # a name, options of pytest; 5 is its exit code when the arguments select no test
  local result="$results/$1.xml"
  shift
  "$python" -m pytest -q --dist worksteal --junitxml "$result" "$@" "${arguments[@]}"
}

at_once() { # how many tests share the GPU: at most 16, a core and 8 GiB of its memory each
  local mib
  mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | sort -n | head -1)
  printf '%s\n' 16 "$(nproc)" "$((${mib:-131072} / 8192))" | sort -n | head -1
}

codex=''
if [ -z "$oldest${arguments[*]}" ]; then # beside the other tests, for it mostly waits; what it says comes behind theirs
  codex_tests >"$results/codex" 2>&1 &
  codex=$!
fi

echo "== pytest"
case " ${arguments[*]} " in
  *" -m gpu"*)
    first=5 second=5 # pytest's exit code where no test was selected
    [[ "${arguments[*]}" == *--on-gpu[=\ ]alone* ]] || { run_tests at-once -n "$(at_once)" --on-gpu at-once; first=$?; }
    [[ "${arguments[*]}" == *--on-gpu[=\ ]at-once* ]] || { run_tests alone -n 0 --on-gpu alone; second=$?; }
    case "$first $second" in "0 0" | "0 5" | "5 0") ;; *) failed+=("pytest") ;; esac
    ;;
  *) run_tests all -n $(($(nproc) * 5 / 2)) || failed+=("pytest") ;; # more than cores: half of a test is waiting
esac
command="bash scripts/test.sh ${oldest:+--oldest }${arguments[*]}"
[ -z "$record" ] || "$python" scripts/tested_with.py "${command% }" "$results"/*.xml || failed+=("record")

if [ -n "$codex" ]; then
  wait "$codex" || failed+=("Codex")
  cat "$results/codex"
fi

[ ${#skipped[@]} -eq 0 ] || echo "NOT RUN, their tools could not be installed: ${skipped[*]}"
[ ${#failed[@]} -eq 0 ] || { echo "FAILED: ${failed[*]}"; exit 1; }
[ ${#skipped[@]} -eq 0 ] || [ "${CI:-}" != true ] || exit 1
