#!/usr/bin/env bash
# What needs a GPU, one part a call or as many as fit a budget:
#
#     benchmarks/run_gpu.sh first                        at most five minutes: the first call on a new machine
#     benchmarks/run_gpu.sh 30 | 45                      the parts that fit so many minutes, in the order below
#     benchmarks/run_gpu.sh tests | attention | ...      one part, well under ten minutes
#
# The order is that of what is learnt a minute:
#
#   first         ids and output against float64; times beside flash attention, random numbers and images; each kernel
#                 beside the model's prediction                                                                   5 min
#   tests         what only a GPU can show: precision, repeats, graphs, memory                                    4 min
#   attention     forward beside SDPA, flash attention, FlexAttention over gathered keys, windows                 9 min
#   backward      the same, forward and backward                                                                  9 min
#   models224     DGT-T beside Swin-T, inference and training; models512 the same at 512 px                       9 min
#   transformers  DINOv3-L (random weights) with `dgt.accelerate` at 2048 and 4096 px                             7 min
#   memcheck      compute-sanitizer: memcheck, racecheck, initcheck                                               9 min
#   training      a ViT at 4,096 tokens                                                                           7 min
#   accelerated   what an accelerated layer takes; profile: every kernel, also backward; kernels: the tests of kernels
#
# Every part writes its rows as it goes and goes on where it stopped when it is called again; what is done on the same
# device with the same versions and kernels is not measured again, what failed is. Where OUT is another, empty folder,
# copy the JSON of the earlier call there first. A kernel that hangs or breaks the device costs its row alone: the rest
# of the part goes on in another process. Exit status 0: done, 3: out of time, call again, 1: a failure.
# DRY_RUN=1 lists what would be measured, on any machine. Leaves JSON and logs under benchmarks/results/ or $OUT. PYTHON
# names the interpreter (default: python3); the package need not be installed, and of its dependencies only torch,
# torchvision, triton, timm, lightning and numpy must be (for the tests pytest with hypothesis, pytest-timeout and
# pytest-xdist).
set -u
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
out=${OUT:-benchmarks/results}
request=${1:-}
dry=${DRY_RUN:+--dry-run}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
unset TRITON_INTERPRET
mkdir -p "$out"
failed=0
unfinished=0

run() { # seconds, command; interrupted at the end of its time, so that pytest tells what failed till then
    echo "== ${*:2}"
    timeout -s INT -k 15 "$1" "${@:2}"
    local status=$?
    case $status in
    0) ;;
    3) unfinished=3 ;;
    *) failed=1; echo "failed ($status): ${*:2}" ;;
    esac
    return "$status"
}

measure() { # seconds, script, part, file: no row is begun in the last fifth of the time
    local end=$((SECONDS + $1)) left=$1 again= turn
    for turn in 1 2 3 4 5 6 7 8; do
        [ "$left" -gt 30 ] || return
        run "$left" "$python" "benchmarks/$2" "$3" --out "$out/$4" --seconds $((left * 4 / 5)) $again $dry && return
        # A row that is still begun took its process along; another process leaves it out.
        grep -qs '^ *"begun"' "$out/$4" || return
        again=--again
        left=$((end - SECONDS))
    done
}

tests() { # seconds, log, arguments: hundreds of kernels are compiled, on all cores
    [ -z "$dry" ] || { echo "tests: ${*:3}"; return; }
    run "$1" "$python" -m pytest -v --tb=short -p no:cacheprovider --timeout 120 --timeout-method thread "${@:3}" 2>&1 |
        tee "$out/$2.log"
    [ "${PIPESTATUS[0]}" = 0 ] || failed=1
}

sanitize() { # PyTorch's cache of blocks hides overruns: off. The kernels are compiled before the tool slows all down.
    [ -z "$dry" ] || { echo "memcheck, racecheck and initcheck of benchmarks/gpu_memcheck.py"; return; }
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    local pids=() pid shape dtype tool
    for shape in 0 1 2 3; do
        for dtype in bfloat16 float16 float32; do
            run 140 "$python" benchmarks/gpu_memcheck.py --shape $shape --dtype $dtype &
            pids+=($!)
        done
    done
    for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
    unset PYTORCH_NO_CUDA_MEMORY_CACHING
    command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not installed: ran without it"; return; }
    for tool in memcheck racecheck initcheck; do
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 run 125 compute-sanitizer --tool "$tool" --error-exitcode 1 \
            "$python" benchmarks/gpu_memcheck.py --dtype bfloat16 2>&1 | tee "$out/gpu_$tool.log"
        [ "${PIPESTATUS[0]}" = 0 ] || failed=1
    done
    grep -l "Device not supported" "$out"/gpu_*check.log && echo "compute-sanitizer cannot work on this machine"
    return 0
}

part() { # name
    case $1 in
    first) measure 290 gpu_attention.py first gpu_first.json ;;
    tests)
        tests 260 gpu_tests -n 4 --dist worksteal tests/ops/triton/test_gpu.py tests/layers/test_triton_layer.py
        ;;
    kernels)
        tests 540 gpu_tests_kernels -n 12 --dist worksteal tests/ops/triton tests/ops/test_group_matmul.py \
            --ignore tests/ops/triton/test_gpu.py --ignore tests/ops/triton/test_compile.py
        ;;
    attention) measure 540 gpu_attention.py forward gpu_attention.json ;;
    backward) measure 540 gpu_attention.py backward gpu_backward.json ;;
    accelerated) measure 300 gpu_attention.py accelerated gpu_accelerated.json ;;
    profile) measure 300 gpu_attention.py profile gpu_profile.json ;;
    models224 | models512) measure 540 gpu_models.py "${1#models}" "gpu_${1/models/models_}.json" ;;
    transformers) measure 420 gpu_transformers.py accelerate gpu_transformers.json ;;
    training) measure 420 gpu_transformers.py train gpu_vit_training.json ;;
    memcheck) sanitize ;;
    *) return 64 ;;
    esac
    return 0
}

budget() { # minutes, parts with the minutes that each may take
    local left=$(($1 * 60)) name needed begun
    for each in "${@:2}"; do
        name=${each%:*} needed=$((${each#*:} * 60))
        [ $left -ge $needed ] || { echo "== no time for $name"; unfinished=3; continue; }
        begun=$SECONDS
        part "$name"
        left=$((left - SECONDS + begun))
    done
}

if [ -z "$dry" ]; then
    "$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "error: no CUDA device")' || exit 1
fi
case $request in
30) budget 30 first:5 tests:4 attention:9 models224:9 backward:9 ;;
45) budget 45 first:5 tests:4 attention:9 backward:9 models224:9 transformers:7 memcheck:9 training:7 ;;
*)
    if ! part "$request" || [ $? = 64 ]; then
        echo "error: no part '$request'; there are first, 30, 45 (minutes), tests, attention, backward, models224," \
            "models512, transformers, memcheck, accelerated, profile, kernels, training" >&2
        exit 2
    fi
    ;;
esac
[ "$failed" = 0 ] || exit 1
exit $unfinished
