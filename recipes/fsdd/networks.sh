#!/bin/sh
# The networks of README.md, each with SGD and NG-SGD: trains and tests them with these seeds, by default 1 to 3. In the project's root:
#   sh recipes/fsdd/networks.sh 1 2 3
# Run dirs are exp/fsdd/NETWORK-OPTIMIZER-SEED. The same command resumes after an interruption; what is finished is not repeated.
# MORE has further options of ddnn train, as "--set schedule.min_epochs=9"; OUT is another folder for the run dirs.
set -e
corpus=recipes/fsdd/corpus out=${OUT:-exp/fsdd}

train() {  # NETWORK LAYERS OPTIMIZER LEARNING_RATE
  run=$out/$1-$3-$seed
  [ -e "$run/wer.json" ] && return
  ddnn train recipes/fsdd/cnn.yaml --run-dir "$run" --resume=auto --set seed="$seed" --set model.layers="[$2]" \
    --set optimizer.name="$3" --set schedule.initial_learning_rate="$4" $MORE
  ddnn evaluate "$run" --data $corpus/test --alignments $corpus/ali_test --json > "$run/test.json"
  ddnn decode-prep "$run" --data $corpus/test --out "$run/decode"
  ddnn score "$run/decode" --graph $corpus/graph --model $corpus/ali/final.mdl --text $corpus/test/text --json > "$run/wer.json.new"
  mv "$run/wer.json.new" "$run/wer.json"
}

both() {  # NETWORK LAYERS
  train "$1" "$2" sgd 0.008
  train "$1" "$2" ng-sgd 0.002
}

[ $# -gt 0 ] || set -- 1 2 3
for seed; do
  both dnn "{affine: 256, repeat: 3}"
  both cnn "{conv: {filters: 32, patch: 8, pool: 3}}, {conv: {filters: 64, patch: 4, layout: kaldi}}, {affine: 256, repeat: 3}"
  both cnn_true "{conv: {filters: 32, patch: 8, pool: 3}}, {conv: {filters: 64, patch: 4}}, {affine: 256, repeat: 3}"
  both dnn-4x512 "{affine: 512, repeat: 4}"
  both cnn-4x512 "{conv: {filters: 64, patch: 8, pool: 3}}, {conv: {filters: 128, patch: 4, layout: kaldi}}, {affine: 512, repeat: 4}"
done
ddnn report "$out"/*/ --no-plots --csv "$out/results.csv"
