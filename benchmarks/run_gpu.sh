#!/usr/bin/env bash
# Everything that needs a GPU, in under ten minutes: tests, memory checker, kernel and model benchmarks.
#
#     benchmarks/run_gpu.sh [tests] [memcheck] [attention] [models]     (none named: all)
#
# Leaves JSON, and the tests' log, under benchmarks/results/ or $OUT. PYTHON names the interpreter (default: python3);
# the package need not be installed. Goes on after a failure, and exits with 1 if there was one.
set -u
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
out=${OUT:-benchmarks/results}
parts=${*:-tests memcheck attention models}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
unset TRITON_INTERPRET
mkdir -p "$out"
failed=0

run() { # seconds, command: with a limit, so that one part cannot eat the time of the others, nor all more than 590 s
    local limit=$((SECONDS + $1 > 590 ? 590 - SECONDS : $1))
    echo "== ${*:2}"
    if [ "$limit" -le 0 ]; then
        echo "failed (no time left): ${*:2}"
        failed=1
        return 1
    fi
    timeout "$limit" "${@:2}" || { echo "failed ($?): ${*:2}"; failed=1; return 1; }
}

"$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "error: no CUDA device")' || exit 1
for part in $parts; do
    case $part in
    tests)
        run 240 "$python" -m pytest -q -p no:cacheprovider tests/ops/triton tests/ops/test_group_matmul.py \
            --deselect tests/ops/triton/test_compile.py --durations=15 2>&1 | tee "$out/gpu_tests.log"
        [ "${PIPESTATUS[0]}" = 0 ] && grep -q " passed" "$out/gpu_tests.log" \
            && ! grep -qE "[0-9]+ (failed|error)|^failed" "$out/gpu_tests.log" || failed=1
        ;;
    memcheck)
        if command -v compute-sanitizer >/dev/null; then
            run 120 compute-sanitizer --tool memcheck --error-exitcode 1 "$python" benchmarks/gpu_memcheck.py
        else
            echo "compute-sanitizer is not installed: running without it"
            run 60 "$python" benchmarks/gpu_memcheck.py
        fi
        ;;
    attention) run 120 "$python" benchmarks/gpu_attention.py --out "$out/gpu_attention.json" ;;
    models) run 300 "$python" benchmarks/gpu_models.py --out "$out/gpu_models.json" ;;
    *) echo "error: no part '$part'; there are tests, memcheck, attention, models" >&2; exit 2 ;;
    esac
done
exit $failed
