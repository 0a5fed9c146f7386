#!/usr/bin/env bash
# What needs a GPU, one part a call, each well under ten minutes and writing its rows as it goes:
#
#     benchmarks/run_gpu.sh tests | attention | accelerated | backward | models224 | models512 | memcheck | profile
#
# The first call on a new machine: tests alone. Leaves JSON and logs under benchmarks/results/ or $OUT. PYTHON names the
# interpreter (default: python3); the package need not be installed, and of its dependencies only torch, torchvision,
# triton, timm, lightning and numpy must be (for the tests pytest with hypothesis, pytest-timeout and pytest-xdist).
set -u
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
out=${OUT:-benchmarks/results}
part=${1:-}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
unset TRITON_INTERPRET
mkdir -p "$out"
failed=0

run() { # seconds, command; interrupted at the end of its time, so that pytest tells what failed till then
    echo "== ${*:2}"
    timeout -s INT -k 15 "$1" "${@:2}" || { failed=$?; echo "failed ($failed): ${*:2}"; return "$failed"; }
}

tests() { # seconds, log, arguments: what only a GPU can show comes first; hundreds of kernels are compiled on all cores
    run "$1" "$python" -m pytest -v --tb=short -p no:cacheprovider "${@:3}" 2>&1 | tee "$out/$2.log"
    [ "${PIPESTATUS[0]}" = 0 ] || failed=1
}

sanitize() { # PyTorch's cache of blocks hides overruns: off. The kernels are compiled before the tool slows all down.
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    local pids=() pid shape dtype tool
    for shape in 0 1 2 3; do
        for dtype in bfloat16 float16 float32; do
            run 140 "$python" benchmarks/gpu_memcheck.py --shape $shape --dtype $dtype &
            pids+=($!)
        done
    done
    for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
    command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not installed: ran without it"; return; }
    for tool in memcheck racecheck initcheck; do
        run 125 compute-sanitizer --tool "$tool" --error-exitcode 1 "$python" benchmarks/gpu_memcheck.py \
            --dtype bfloat16 2>&1 | tee "$out/gpu_$tool.log"
        [ "${PIPESTATUS[0]}" = 0 ] || failed=1
    done
    grep -l "Device not supported" "$out"/gpu_*check.log && echo "compute-sanitizer cannot work on this machine"
    return 0
}

"$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "error: no CUDA device")' || exit 1
case $part in
tests)
    tests 260 gpu_tests -n 4 --dist worksteal tests/ops/triton/test_gpu.py tests/layers/test_triton_layer.py
    tests 300 gpu_tests_kernels -n 12 --dist worksteal tests/ops/triton tests/ops/test_group_matmul.py \
        --ignore tests/ops/triton/test_gpu.py --ignore tests/ops/triton/test_compile.py
    ;;
attention) run 560 "$python" benchmarks/gpu_attention.py forward --out "$out/gpu_attention.json" ;;
accelerated) run 560 "$python" benchmarks/gpu_attention.py accelerated --out "$out/gpu_accelerated.json" ;;
backward) run 560 "$python" benchmarks/gpu_attention.py backward --out "$out/gpu_backward.json" ;;
profile) run 560 "$python" benchmarks/gpu_attention.py profile --out "$out/gpu_profile.json" ;;
models224 | models512)
    size=${part#models}
    run 560 "$python" benchmarks/gpu_models.py --size "$size" --out "$out/gpu_models_$size.json"
    ;;
memcheck) sanitize ;;
*)
    echo "error: no part '$part'; there are tests, attention, accelerated, backward, models224, models512, memcheck, profile" >&2
    exit 2
    ;;
esac
[ "$failed" = 0 ] || exit 1
