#!/usr/bin/env bash
# Trains and packs the models that two cores can make, each with its card, log and checksums:
#
#     tools/make_weights.sh DATA OUT [scenes] [imagenette] [camvid] [detector] [vit]      (none named: all)
#
# DATA holds imagenette128/{train,val}/CLASS and camvid/{images,labels}/{train,val}; the rest is drawn by code.
# OUT gets runs/, and a folder for each model: `DGT_WEIGHTS=OUT` has timm, `dgt predict` and the others find them by name.
# The same line again goes on where it stopped, to the last bit, and leaves alone what is there. Each takes some 10 to 40
# minutes of one core, camvid one and a half hours, imagenette two and a half; two parts can run side by side.
set -eu
cd "$(dirname "$0")/.."
data=$(realpath "${1:?usage: tools/make_weights.sh DATA OUT [scenes] [imagenette] [camvid] [detector] [vit]}")
out=$(realpath -m "${2:?name the folder that the weights go to}")
shift 2
export PYTHONPATH=src:.${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=${PYTHON:-python3}
dgt=${DGT:-"$python -m dgt"}

train() { # run, recipe, settings
    local run=$1 recipe=$2
    shift 2
    $dgt train "$recipe" --out "$out/runs/$run" --resume auto --trainer.accelerator cpu "$@"
}

pack() { # folder of weights, run, options
    local name=$1 run=$2
    shift 2
    [ -d "$out/$name" ] || $python -m tools.weights make "$out/runs/$run" --out "$out/$name" "$@"
}

imagenette=(imagenette128 --data.root "$data/imagenette128" --data.num_workers 0 --data.augmentation.erasing 0
    --ema.decay null)
# Patches of 4 x 4 pixels: 256 tokens at 64 px, 4,096 at 256 px. Small images first, which cost the least.
vit=(--model.name vit_tiny_patch16_224 --model.drop_path_rate 0 --trainer.precision bf16-mixed --model.args
    '{"patch_size": 4, "img_size": 64, "dynamic_img_size": true, "embed_dim": 128, "depth": 4, "num_heads": 2}')

for part in ${*:-scenes imagenette camvid detector vit}; do
    case $part in
    scenes)
        train demo scenes
        pack dgt_nano.scenes demo --half
        ;;
    imagenette)
        # Small images first, which cost the least; measured at 128 px, where objects look as large as in the crops.
        train nano64 imagenette_nano --data.root "$data/imagenette128" --data.image_size 64 --schedule.epochs 75 \
            --schedule.min_lr 5e-4 --trainer.check_val_every 25
        train nano96 imagenette_nano --data.root "$data/imagenette128" --model.init_from "$out/runs/nano64" \
            --optimizer.lr 7e-4 --schedule.warmup_epochs 1 --schedule.epochs 105 --trainer.check_val_every 35
        pack dgt_nano.imagenette nano96 --half --image-size 128
        ;;
    camvid)
        train camvid camvid_nano --data.root "$data/camvid" --model.init_from dgt_nano.imagenette \
            --model.args.residual_keys 1 --schedule.epochs 70
        pack dgt_nano.camvid camvid --half
        ;;
    detector)
        train detector scenes_detect
        pack dgt_nano.scenes_detect detector --half
        ;;
    vit)
        train vit64 "${imagenette[@]}" "${vit[@]}" --data.image_size 64 --data.batch_size 32 --schedule.epochs 6 \
            --schedule.warmup_epochs 1
        train vit128 "${imagenette[@]}" "${vit[@]}" --data.image_size 128 --data.batch_size 16 --data.train_size 3200 \
            --schedule.epochs 1 --schedule.warmup_epochs 0.1 --optimizer.lr 4e-4 --optimizer.lr_batch 16 \
            --data.val_size 500 --model.init_from "$out/runs/vit64"
        train vit256 "${imagenette[@]}" "${vit[@]}" --data.image_size 256 --data.batch_size 4 --data.train_size 480 \
            --schedule.epochs 1 --schedule.warmup_epochs 0.1 --optimizer.lr 2e-4 --optimizer.lr_batch 4 \
            --data.val_size 200 --model.init_from "$out/runs/vit128"
        # By images that the model was not trained on: its errors on others are larger
        [ -f "$out/plan.json" ] || $dgt accelerate "$out/runs/vit256/model" --images "$data/imagenette128/val" \
            --size 256 --count 96 --error 0.05 --out "$out/plan.json"
        pack vit_patch4.imagenette256 vit256 --plan "$out/plan.json"
        ;;
    *)
        echo "error: no part $part" >&2
        exit 2
        ;;
    esac
done
DGT_WEIGHTS=$out $dgt weights list
