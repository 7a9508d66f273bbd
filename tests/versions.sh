#!/usr/bin/env bash
# Runs the tests under the oldest and the newest torch and Python that pyproject admits, each in a venv of its own.
# On Linux these are CUDA builds of torch, about 3 GB each; they run on the CPU.
set -euo pipefail
cd "$(dirname "$0")/.."

check() { # python, torch
    local venv="build/torch-$2"
    echo "== $("$1" --version), torch $2"
    "$1" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "torch==$2" --editable '.[test,timm]'
    "$venv/bin/python" -c "import torch; print(torch.__version__)"
    "$venv/bin/python" -m pytest -q -p no:cacheprovider
}

check "${PYTHON_OLDEST:-python3.10}" 2.6.0
check "${PYTHON_NEWEST:-python3.13}" 2.15.0
