#!/usr/bin/env bash
# The first thing to run on a machine with a GPU: the measurements of gpu.py, most telling first, for ten minutes, then
# the tests of the kernels there.
#
#     benchmarks/run_gpu.sh [arguments of gpu.py]
#
# Leaves gpu.json and gpu_tests.log in OUT (default benchmarks/results). A row of the measurements takes at most three
# minutes (--seconds), and is in the file at once: the same call again goes on where it stopped. PYTHON names the
# interpreter (default python3), MINUTES when the last row begins (default 10), WORKERS how many processes test (default
# 8; 0 leaves the tests out). With --device cpu it tries the measurements on small sizes. Exit status 1 if anything
# failed.
set -u
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
out=${OUT:-benchmarks/results}
workers=${WORKERS:-8}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
unset TRITON_INTERPRET
case " $* " in
*" --device cpu "*) workers=0 ;;
*) "$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "error: no CUDA device")' || exit 1 ;;
esac
mkdir -p "$out" || exit 1
# Else PyTorch's compiler starts a process for every core, in every process that tests.
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-1}
"$python" benchmarks/gpu.py --out "$out/gpu.json" --minutes "${MINUTES:-10}" "$@"
measured=$?
[ "$workers" = 0 ] && exit "$measured"
"$python" -m pytest -q --timeout 120 --numprocesses "$workers" --dist load \
    tests/ops/triton tests/layers/test_triton_layer.py 2>&1 | tee "$out/gpu_tests.log"
tested=${PIPESTATUS[0]}
exit $((measured || tested))
