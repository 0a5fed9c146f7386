#!/usr/bin/env bash
# Imagenette at 128 px on one GPU: accuracy after 5, 20, 80 and 200 epochs from random weights beside the public record,
# and the tables of blocks and of hybrids on the same images.
#
#     benchmarks/imagenette_gpu.sh DATA [check] [record] [blocks] [hybrids]     (none named: all, in this order)
#
# DATA is the data set: folders train/CLASS and val/CLASS, or a Hugging Face data set.
# A call ends within LIMIT seconds (default 570). The same call again goes on where it stopped, to the last bit, and does
# nothing where all is done; exit status 0: done, 3: call again, 1: something failed. On an H200 all of it should take
# three calls, less than thirty minutes: an estimate, nobody has run it there.
#
#   check      a few steps with the Triton kernels; where they fail, the rest runs with backend="torch", and says so
#   record     the table `imagenette`: 5, 20, 80 and 200 epochs, in this order
#   blocks, hybrids    these tables with DGT-T, Swin-T and CSWin-T: EPOCHS epochs (default 10) of batch 128
#
# OUT is the folder of runs (default runs/imagenette); finished tables are copied to RESULTS (default benchmarks/results)
# as imagenette_NAME.json and .md. PYTHON names the interpreter (default python3); the package need not be installed, but
# what it depends on must be: torch, torchvision, timm, lightning, torchmetrics, tensorboard, rich, yaml.
# SMALL=1 proves the script anywhere in some two minutes: 32 images of 32 px, one epoch a row; tables go to OUT.
set -u
cd "$(dirname "$0")/.." || exit 1
data=${1:?usage: benchmarks/imagenette_gpu.sh DATA [check] [record] [blocks] [hybrids]}
shift
parts=${*:-check record blocks hybrids}
python=${PYTHON:-python3}
out=${OUT:-runs/imagenette}
limit=${LIMIT:-570}
results=${RESULTS:-$([ "${SMALL:-0}" = 1 ] && echo "$out" || echo benchmarks/results)}
table_settings=(--schedule.epochs "${EPOCHS:-10}" --schedule.warmup_epochs 1 --data.batch_size 128)
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
[ -e "$data" ] || { echo "error: there is no data set $data" >&2; exit 2; }
# Before anything is tried on the device.
"$python" - <<'END' || exit 1
import importlib.util, sys
needed = "torch torchvision timm lightning torchmetrics tensorboard rich yaml"
missing = [name for name in needed.split() if importlib.util.find_spec(name) is None]
sys.exit(f"error: Python packages are missing: {', '.join(missing)}" if missing else 0)
END
mkdir -p "$out" "$results" || exit 1

common=(--data.root "$data" --data.num_workers "$(($(nproc) > 2 ? $(nproc) - 2 : 0))" --checkpoint.every_epochs null
    --checkpoint.every_minutes 3 --trainer.devices 1)
record=imagenette
if [ "${SMALL:-0}" = 1 ]; then
    common+=(--data.train_size 32 --data.val_size 32 --data.image_size 32)
    table_settings=(--schedule.epochs 1 --schedule.warmup_epochs 0.5 --data.batch_size 16)
    record=$out/imagenette.yaml # the shipped table with short rows
    sed -E 's/(schedule.epochs: )[0-9]+/\11/; s/(warmup_epochs: )[0-9]+/\10.5/; s/(batch_size: )[0-9]+/\116/' \
        src/dgt/recipes/tables/imagenette.yaml >"$record" || exit 1
else
    "$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "error: no CUDA device")' || exit 1
    common+=(--data.cache true)
fi

run() { # command: with what is left of the time; status 3 where that was too short
    local left=$((limit - SECONDS - 20)) status
    [ "$left" -gt 5 ] || return 3
    echo "== $* ($left s)"
    timeout -s TERM -k 20 "$left" "$@" # SIGTERM: saves and stops
    status=$?
    case $status in 124 | 137) return 3 ;; *) return "$status" ;; esac
}

table() { # name, table, further words: train it, and copy it where it is whole
    local backend
    backend=$(cat "$out/backend" 2>/dev/null || echo auto)
    run "$python" -m dgt ablate "$2" --size tiny --seeds 1 --out "$out/$1" "${common[@]}" \
        --model.args.backend "$backend" "${@:3}" || return
    cp "$out/$1/table.json" "$results/imagenette_$1.json" && cp "$out/$1/table.md" "$results/imagenette_$1.md"
}

check() { # a few steps; notes the backend that works
    [ -e "$out/backend" ] && return 0
    local backend
    for backend in auto torch; do
        rm -rf "$out/check"
        if run "$python" -m dgt train imagenette128 --out "$out/check" "${common[@]}" --data.train_size 128 \
            --data.val_size 64 --schedule.epochs 1 --schedule.warmup_epochs 0 --model.args.backend "$backend"; then
            echo "$backend" >"$out/backend"
            return 0
        fi
        echo "FAILED with backend=\"$backend\""
    done
    return 1
}

for part in $parts; do
    case $part in
    check) check ;;
    record) table record "$record" ;;
    blocks | hybrids) table "$part" "$part" "${table_settings[@]}" ;;
    *) echo "error: no part '$part'; there are check, record, blocks, hybrids" >&2; exit 2 ;;
    esac
    status=$?
    if [ "$status" = 3 ]; then
        echo "== out of time in '$part': the same call again goes on"
        exit 3
    fi
    [ "$status" = 0 ] || { echo "== failed ($status): $part"; exit 1; }
done
echo "== done: tables in $results"
