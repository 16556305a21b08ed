#!/usr/bin/env bash
# The XPU check: every kernel compiled for Intel GPUs and run on this CPU, by the tests of the ops. Exits with 1 where a
# test or the report fails, with 3 where the check cannot run here. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

bash xpu_offline/setup.sh
python=.venv-xpu/bin/python
seen=.venv-xpu/observations
tests=(xpu_offline/model_sizes.py)
for folder in tests/common/kernels tests/quant; do
    [ -d "$folder" ] && tests+=("$folder")
done
rm -rf "$seen"
mkdir -p "$seen"
"$python" -m xpu_offline.lint || failed=1

# One process a core, each with a part of the tests.
parts=${XPU_CHECK_PROCESSES:-$(nproc)}
export OMP_NUM_THREADS=1
pids=()
for ((i = 0; i < parts; i++)); do
    "$python" -m pytest -p xpu_offline.plugin --backend xpu-offline -q --tb=short -p no:cacheprovider \
        --xpu-shard "$i/$parts" --xpu-observations "$seen/$i.json" "${tests[@]}" "$@" >"$seen/$i.log" 2>&1 &
    pids+=($!)
done
for ((i = 0; i < parts; i++)); do
    # 5: no test in this part.
    wait "${pids[i]}" || [ $? = 5 ] || failed=1
done
for ((i = 0; i < parts; i++)); do
    echo "--- part $((i + 1)) of $parts"
    tail -n "${XPU_CHECK_LINES:-60}" "$seen/$i.log"
    if [ ! -e "$seen/$i.json" ]; then
        echo "FAIL the compiler or the code took the process down; what was compiled last:"
        cat "$seen/$i.json.compiling"
        failed=1
        echo '[]' >"$seen/$i.json"
    fi
done
"$python" -m xpu_offline.report "$seen"/*.json --markdown docs/xpu_conformance.md --json docs/xpu_conformance.json \
    || failed=1
exit "${failed:-0}"
