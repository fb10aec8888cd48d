#!/usr/bin/env bash
# Validates every SKILL.md with skills-ref: validate_skills.sh [PROGRAM]. A skill must lie in a folder of its name, so the
# root skill is looked at through a link of that name.
set -euo pipefail
bundle=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
program=${1:-$(dirname "$("$bundle/scripts/python.sh")")/agentskills}
command -v "$program" >/dev/null || { echo "$program is not there; run: bash scripts/setup.sh checks" >&2; exit 3; }
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
ln -s "$bundle" "$stage/gpu-kernel-optimizer"
count=0
for file in "$stage/gpu-kernel-optimizer/SKILL.md" "$bundle"/skills/*/SKILL.md; do
  "$program" validate "$(dirname "$file")"
  count=$((count + 1))
done
[ "$count" -ge 2 ] || { echo "no sub-skill found in $bundle/skills" >&2; exit 1; }
