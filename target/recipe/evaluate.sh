#!/bin/sh
# Train the scorers of bench/results/cuda-eval.csv and judge them: one tracing, many trainings, then `tandem eval`.
#   TANDEM=build/release/tandem MODEL=models/SmolLM2-135M-Instruct.Q4_1.gguf sh target/recipe/evaluate.sh TEXTS_DIR OUT_DIR
# TEXTS_DIR is what make_texts.py wrote. A GPU and 16 cores need half an hour.
set -eu
texts="$1"/*.txt out=$2
t=${TANDEM:-build/release/tandem} m=${MODEL:-models/SmolLM2-135M-Instruct.Q4_1.gguf}
mkdir -p "$out"

train() { # name, options
    name=$1
    shift
    # shellcheck disable=SC2086
    "$t" distill -m "$m" --windows 560 --checkpoint "$out/windows.bin" --json -o "$out/$name.safetensors" "$@" $texts > "$out/distill-$name.json"
}
late() { name=$1; shift; train "$name" --layer 12 --resume --steps 1200 "$@"; }
mlp() { name=$1; shift; train "$name" --layer 6 --resume --scorer mlp --label last --aim 0 --steps 160 --batch 8 "$@"; }
ask() { # name, options
    name=$1
    shift
    "$t" eval -m "$m" --json "$out/$name.json" --lengths 7800 --texts 0 --keep-blocks 32 "$@"
}

train traced --layer 6,12 --steps 1 # windows of both layers
inside() { # name, options: windows with questions inside answers, a tracing of its own
    name=$1
    shift
    # shellcheck disable=SC2086
    "$t" distill -m "$m" --windows 560 --inside --checkpoint "$out/inside.bin" --aim 0.8 --json -o "$out/$name.safetensors" "$@" $texts > "$out/distill-$name.json"
}
late aim8 --aim 0.8
late aim5
late aim0 --aim 0
late aim5_decay --learning-rate 0.001 --weight-decay 0.1
late aim5_deep --label deep
late aim5_heads8 --heads 8
late aim5_no_code --leave-out code
train aim5_layer6 --layer 6 --resume --steps 1200
mlp pure --queries 1
mlp bce --queries 1 --loss bce
mlp no_layernorm --queries 1 --no-layernorm
mlp pool --queries 32

inside inside_traced --layer 6,12 --steps 1
inside inside --layer 12 --resume --steps 1200
inside inside_layer6 --layer 6 --resume --steps 1200

s() { printf '%s/%s.safetensors' "$out" "$1"; }
shipped=$(s aim8)
ask choose --seed 2 --needles 300 --kinds single --texts 5 --following 392 --keep-blocks 32,12 --selectors scorer \
    --scorer "$shipped,$(s aim5),$(s aim0),$(s aim5_decay),$(s aim5_deep),$(s aim5_heads8)"
ask big --needles 1000 --kinds single --texts 20 --following 392 --keep-blocks 32,12 --scorer "$shipped" --answers "$out/big.jsonl"
ask layer6 --needles 300 --kinds single --texts 20 --following 392 --selectors observed,scorer \
    --scorer "$(s pure),$(s bce),$(s no_layernorm),$(s pool),$(s aim5_layer6)"
ask each_step --needles 300 --kinds single --selectors scorer --scorer "$(s pure)" --each-step
ask keep --needles 300 --kinds single --keep-blocks 32 --keep .05,.1,.2,.25 --min-blocks 4 --reserve 0,.01,.02 --selectors observed,scorer --scorer "$shipped"
ask hop_late --needles 300 --kinds two-hop,late --smooth 0,.5 --again --selectors observed,scorer --scorer "$shipped"
ask no_code --needles 300 --kinds single --texts 20 --following 392 --selectors scorer --scorer "$shipped,$(s aim5_no_code)"
ask exact --needles 200 --kinds single --selectors recent --exact 16
for seed in 1 3; do
    ask "six_$seed" --seed $seed --needles 300 --kinds single --texts 20 --following 392 --keep-blocks 32,12 --selectors observed,recent,scorer \
        --scorer "$(s aim5_layer6),$(s inside_layer6)"
done
ask lists --needles 300 --kinds single --texts 20 --following 392 --keep-blocks 32,12 --selectors observed,scorer --scorer "$shipped" \
    --lists layer,head --select2 20 --quarters 1,2 --sizes 16,32,128
ask bounds --needles 300 --kinds single --texts 20 --following 392 --keep-blocks 32,12 --selectors observed,mean,minmax,bound,scorer \
    --scorer "$shipped,$(s inside)" --recheck
ask inside --needles 300 --kinds late,two-hop --answer-tokens 12 --keep-blocks 32,12 --selectors observed,scorer \
    --scorer "$shipped,$(s inside)" --again
ask inside_layer6 --needles 300 --kinds late,two-hop --answer-tokens 12 --keep-blocks 32,12 --selectors observed,scorer \
    --scorer "$(s aim5_layer6),$(s inside_layer6)" --again
for seed in 7 8; do
    ask "drop_$seed" --seed $seed --needles 150 --kinds late --answer-tokens 12 --keep-blocks 32,12 --selectors observed,scorer \
        --scorer "$shipped" --again --drop .5
done
ask calibration --lengths 3072,5120,7680 --needles 300 --texts 20 --following 392 --kinds single --keep-blocks 64,48,32,24,16,12 \
    --selectors scorer --scorer "$shipped" --calibrate scorer --within-loss .04 --calibrate-into "$shipped"
