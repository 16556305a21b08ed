#!/usr/bin/env bash
# On a machine with a GPU: the op tests on it, and a report to send. Exits with 1 where a test fails, with 3 where there
# is no such GPU. DEVICE=cuda makes the same report of an NVIDIA GPU. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

device=${DEVICE:-xpu}
python=${PY:-.venv/bin/python}
report=$device-test-report.txt
"$python" -c "import sys, torch; sys.exit(not getattr(torch, '$device').is_available())" || {
    echo "xpu-test: PyTorch in $python sees no $device device; xpu-ports doctor says why" >&2
    exit 3
}
tests=()
for folder in tests/common/kernels tests/quant; do
    [ -d "$folder" ] && tests+=("$folder")
done
{
    git rev-parse HEAD 2>/dev/null || true
    uname -srm
    "$python" -m xpu_ports.cli.main doctor || true
    "$python" - <<'PYTHON'
import importlib.metadata
for name in ("torch", "triton", "pytorch-triton-xpu", "triton-xpu", "transformers"):
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        pass
PYTHON
    "$python" -m pytest -p xpu_offline.card -p no:cacheprovider -q -rA --tb=short --show-capture=no \
        --backend "$device" --backend "$device-reference" "${tests[@]}" "$@"
} 2>&1 | tee "$report"
echo "written to $report"
