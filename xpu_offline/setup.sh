#!/usr/bin/env bash
# Builds .venv-xpu: Intel's Triton compiler and an OpenCL runtime that runs its code on a CPU. Idempotent.
# Exits with 3, saying what is missing, where that is not possible.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv-xpu
python=${PYTHON:-python3}
debian=(ocloc:intel-opencl-icd readelf:binutils g++:g++)
libraries=(libze_loader:libze-dev libOpenCL:ocl-icd-libopencl1)
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)

missing() {
    echo "xpu-check: $1" >&2
    exit 3
}

packages=()
for pair in "${debian[@]}"; do
    command -v "${pair%%:*}" >/dev/null || packages+=("${pair##*:}")
done
# Not through a pipe: grep ends at the first match, and ldconfig's broken pipe would count as a failure.
loadable=$(ldconfig -p 2>/dev/null || true)
for pair in "${libraries[@]}"; do
    [[ $loadable == *"${pair%%:*}.so"* ]] || packages+=("${pair##*:}")
done
[ -e /usr/include/level_zero/ze_api.h ] || [[ " ${packages[*]-} " == *" libze-dev "* ]] || packages+=(libze-dev)
if [ ${#packages[@]} -gt 0 ]; then
    wanted="the packages ${packages[*]} are missing"
    [ "$(uname -m)" = x86_64 ] || missing "$wanted, and they exist for x86-64 alone"
    command -v apt-get >/dev/null || missing "$wanted, and there is no apt-get: install them by hand"
    [ "$(id -u)" = 0 ] || missing "$wanted: as root, run  apt-get install -y ${packages[*]}"
    echo "xpu-check: installing ${packages[*]}"
    apt-get update -qq && apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null \
        || missing "$wanted, and apt-get cannot install them"
fi

# Built again when what it is made of changes.
stamp="$venv/.built-$(sha256sum pyproject.toml setup.py "$0" | sha256sum | cut -c1-16)"
if [ ! -e "$stamp" ]; then
    command -v "$python" >/dev/null || missing "no $python; name one with PYTHON="
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
        || missing "triton-xpu 3.3.0b1 is for Python 3.11 to 3.13; name one with PYTHON="
    echo "xpu-check: building $venv (a gigabyte of packages)"
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    "${pip[@]}" install "torch==2.13.0+cpu" 2>/dev/null \
        || "${pip[@]}" install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu 2>/dev/null \
        || "${pip[@]}" install torch==2.13.0 || missing "PyTorch cannot be installed"
    # A build for CUDA brings a Triton of the same name, which would be left half overwritten.
    "${pip[@]}" uninstall -y triton >/dev/null 2>&1 || true
    "${pip[@]}" install numpy triton-xpu==3.3.0b1 intel-sycl-rt intel-opencl-rt pyopencl \
        pytest pytest-timeout "setuptools>=77" || missing "the Python packages cannot be installed"
    "${pip[@]}" install --no-deps --no-build-isolation -e . || missing "xpu-ports cannot be installed"
    rm -f "$venv"/.built-*
    touch "$stamp"
fi
