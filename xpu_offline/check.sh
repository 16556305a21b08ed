#!/usr/bin/env bash
# The XPU check: every kernel compiled for Intel GPUs and run on this CPU, by the tests of the ops. Exits with 1 where a
# test or the report fails, with 3 where the check cannot run here. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

bash xpu_offline/setup.sh
python=$PWD/.venv-xpu/bin/python
seen=$PWD/.venv-xpu/observations
rm -rf "$seen"
mkdir -p "$seen"
export OMP_NUM_THREADS=1
"$python" -m xpu_offline.lint || failed=1
"$python" -m xpu_offline.files "$seen" "$@" || failed=1
"$python" -m xpu_offline.report "$seen"/*.json --markdown docs/xpu_conformance.md --json docs/xpu_conformance.json \
    || failed=1
exit "${failed:-0}"
