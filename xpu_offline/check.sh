#!/usr/bin/env bash
# The XPU check: every kernel compiled for Intel GPUs and run on this CPU, by the tests of the ops. Exits with 1 where a
# test or the report fails, with 3 where the check cannot run here. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

bash xpu_offline/setup.sh
# Counted before: nproc gives OMP_NUM_THREADS where that is set.
processes=${XPU_CHECK_PROCESSES:-$(env -u OMP_NUM_THREADS nproc)}
export python=$PWD/.venv-xpu/bin/python OMP_NUM_THREADS=1
export seen=$PWD/.venv-xpu/observations
rm -rf "$seen"
mkdir -p "$seen"
"$python" -m xpu_offline.lint || failed=1

# One process a file of tests, since the compiler or the code can take a process down; as many at once as there are cores.
# A file that passed, and of which nothing has changed since, is not run again.
run() {
    local file=$1 name log
    shift
    name=${file//\//.}
    log=$seen/$name.log
    "$python" -m xpu_offline.results "$file" "$seen/$name.json" "$@" && return
    local status=0
    "$python" -m pytest -p xpu_offline.plugin --backend xpu-offline -q --tb=short -rN --capture=sys -p no:cacheprovider \
        --xpu-observations "$seen/$name.json" --xpu-results-of "$file" tests/conftest.py "$file" "$@" >"$log" 2>&1 || status=$?
    # 5: no test of the file takes part.
    [ $status = 0 ] || [ $status = 5 ] || echo "$file: exit status $status" >>"$seen/failed"
    if [ ! -e "$seen/$name.json" ]; then
        echo '[]' >"$seen/$name.json"
        echo "FAILED $file: the process ended; compiled last: $(cat "$seen/$name.json.compiling")" >>"$log"
    fi
    echo "--- $file"
    grep "^FAILED\|^ERROR\| in [0-9.]*s" "$log" || tail -n 20 "$log"
}
export -f run
# The longest first, so that no process is left with one of them at the end.
longest=(tests/common/kernels/test_{kda_chunk,sparse_mla,skinny_linear,ssd_chunk_scan,mhc}.py xpu_offline/model_sizes.py)
{
    printf '%s\n' "${longest[@]}"
    find tests/common/kernels tests/quant/*/kernels -name "test_*.py" | sort | grep -vxFf <(printf '%s\n' "${longest[@]}")
} | xargs -P "$processes" -I{} bash -c 'run "$@"' run {} "$@" || failed=1
"$python" -m xpu_offline.report "$seen"/*.json --markdown docs/xpu_conformance.md --json docs/xpu_conformance.json \
    || failed=1
[ ! -e "$seen/failed" ] || { cat "$seen/failed" && failed=1; }
exit "${failed:-0}"
