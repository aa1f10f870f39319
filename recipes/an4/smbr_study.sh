#!/bin/sh
# sMBR and model averaging on AN4: what docs/results/an4-smbr.md reports. In the project's root, after the trainings of README.md:
#   sh recipes/an4/smbr_study.sh 1 2 3 && python recipes/an4/smbr_study.py exp/an4/smbr-study --out docs/results/an4-smbr
# About 50 minutes of two cores a seed. What is finished is not repeated. With KALDI, a folder with an4_ali.1.gz and an4_denlat.1.gz, Kaldi's own alignment
# and lattices are used, too.
set -e
corpus=recipes/an4/corpus out=${OUT:-exp/an4/smbr-study} model=recipes/an4/corpus/ali/final.mdl
mkdir -p "$out"
[ -e "$out/dengraph" ] || ddnn graph --lang $corpus/lang --tree $corpus/ali/tree --model $model --text $corpus/train/text --out "$out/dengraph"
if [ -n "$KALDI" ]; then
  mkdir -p "$out/ali-kaldi" "$out/lats-kaldi"
  cp "$KALDI/an4_ali.1.gz" "$out/ali-kaldi/ali.1.gz"
  cp $model "$out/ali-kaldi"
  cp "$KALDI/an4_denlat.1.gz" "$out/lats-kaldi/lat.1.gz"
  echo 1 | tee "$out/ali-kaldi/num_jobs" > "$out/lats-kaldi/num_jobs"
fi

score() {  # RUN: word error rates with both graphs
  [ -e "$out/$1/score.graph_ug" ] && return
  ddnn decode-prep "$out/$1" --data $corpus/test --out "$out/$1/decode" --priors class-counts
  for graph in graph graph_ug; do
    ddnn score "$out/$1/decode" --graph $corpus/$graph --model $model --text $corpus/test/text \
      --acoustic-scale 0.07,0.1,0.143 --out "$out/$1/score.$graph"
  done
}

prepare() {  # RUN: alignment and lattices of a network, with the lattice beam of Kaldi's lattices of this corpus
  score "$1"
  [ -e "$out/ali-$1" ] || ddnn align "$out/$1" --data $corpus/train --lang $corpus/lang --model $model \
    --tree $corpus/ali/tree --out "$out/ali-$1"
  ddnn denlats "$out/$1" --graph "$out/dengraph" --model $model --data $corpus/train \
    --out "$out/lats-$1" --lattice-beam 6
}

smbr() {  # SET NETWORK SYSTEM WORKERS LEARNING_RATE SEED: four passes with the alignment and lattices of a system
  run=$1-${4}w-$5-$6
  [ -e "$out/$run/final.safetensors" ] || ddnn train recipes/an4/smbr.yaml --run-dir "$out/$run" --resume=auto --workers "$4" --set seed="$6" \
    --set init.model="$out/$2" --set data.alignments="$out/ali-$3" --set criterion.lattices="$out/lats-$3" \
    --set schedule.initial_learning_rate="$5" --set parallel.scale_learning_rate=false --set parallel.averaging_frames=2500
  score "$run"
}

for seed; do
  [ -e "$out/ce-$seed" ] || cp -r "exp/an4/sgd-rbm-$seed" "$out/ce-$seed"
  prepare "ce-$seed"
  smbr own "ce-$seed" "ce-$seed" 1 1e-5 "$seed"
  [ -z "$KALDI" ] || smbr kaldi "ce-$seed" kaldi 1 1e-5 "$seed"
done
for seed; do
  for setting in "4 1e-5" "4 2e-5" "4 4e-5" "16 1e-5" "16 4e-5" "16 1.6e-4" "1 4e-5" "1 1.6e-4"; do
    set -- $setting
    smbr own "ce-$seed" "ce-$seed" "$1" "$2" "$seed"
  done
  [ -e "$out/ce16-$seed/final.safetensors" ] || ddnn train recipes/an4/workers.yaml --run-dir "$out/ce16-$seed" --resume=auto --workers 16 \
    --set seed="$seed" --set pretrain.dbn="exp/an4/rbm-$seed"
  prepare "ce16-$seed"
  for setting in "1 1e-5" "4 4e-5" "16 4e-5" "16 1.6e-4"; do
    set -- $setting
    smbr avg16 "ce16-$seed" "ce16-$seed" "$1" "$2" "$seed"
  done
  [ -e "$out/realigned-$seed/final.safetensors" ] || ddnn train recipes/an4/sgd-rbm.yaml --run-dir "$out/realigned-$seed" --resume=auto \
    --set seed="$seed" --set data.alignments="$out/ali-ce-$seed" --set pretrain.dbn="exp/an4/rbm-$seed"
  score "realigned-$seed"
done
