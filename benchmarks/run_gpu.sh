#!/usr/bin/env bash
# The first thing to run on a machine with a GPU: the tests of the kernels there, then the measurements of gpu.py.
#
#     benchmarks/run_gpu.sh [arguments of gpu.py]
#
# Leaves gpu_tests.log and gpu.json in OUT (default benchmarks/results). A row of the measurements takes at most two
# minutes (--seconds), and is in the file at once: the same call again goes on where it stopped. PYTHON names the
# interpreter (default python3), WORKERS how many processes test (default 8). Exit status 1 if anything failed.
set -u
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
out=${OUT:-benchmarks/results}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
unset TRITON_INTERPRET
"$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "error: no CUDA device")' || exit 1
mkdir -p "$out" || exit 1
# Else PyTorch's compiler starts a process for every core, in every process that tests.
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-1}
"$python" -m pytest -q --timeout 120 --numprocesses "${WORKERS:-8}" --dist load \
    tests/ops/triton tests/layers/test_triton_layer.py 2>&1 | tee "$out/gpu_tests.log"
tested=${PIPESTATUS[0]}
"$python" benchmarks/gpu.py --out "$out/gpu.json" "$@" && exit "$tested"
exit 1
