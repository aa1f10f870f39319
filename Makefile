# make demo    the main job on a synthetic corpus: data, training, evaluation, word error rate
# make an4     a DNN on a real corpus, beside Kaldi's GMM and networks: recipes/an4
# make test    lint and tests
# make test-slurm  the tests that start a real Slurm on this machine (root, Debian)
# make fuzz    damaged files to every reader, for FUZZ_SECONDS (600) on all cores
# make check-swbd  recipes/swbd against a synthetic corpus of Switchboard's shape, without training: seconds
# make docs    the documentation site in docs/_build, with the pages and pictures that are generated: half a minute
# make bench   the training step against the machine's GEMM limit
# make gpu     what waits for a GPU, in one go: tests, speed, memory, losses against the CPU; 9 minutes, no network: docs/development/gpu.md. DEVICE=cpu rehearses
# make soak    each of four workers killed in five places, then 200 kills at random moments, and the results compared: a quarter of an hour without other load
# make same-results  a few dozen tiny trainings against recorded digests: first make same-results RECORD=1, on the code before a change
# make mutants  the mistakes of tests/mutants.yaml, one at a time: which of them the tests notice; MUTANTS='--only 7 --jobs 2'
# Each sets up what it needs in .venv. PYTHON, VENV, TORCH and PIP_FLAGS can be set on the command line.
PYTHON ?= python3
VENV ?= .venv
# Empty: torch 2.13.0, without CUDA (0.2 GB to download) where there is no NVIDIA driver and an index has that build.
TORCH ?=
TORCH_VERSION := 2.13.0
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
PIP_FLAGS ?=
FUZZ_SECONDS ?= 600
BIN := $(VENV)/bin
DDNN := $(BIN)/ddnn
PIP = $(BIN)/pip install -q --disable-pip-version-check $(PIP_FLAGS)
# Several OpenMP threads on GEMMs of this size are slower than one, and the tests run in parallel.
export OMP_NUM_THREADS ?= 1

.PHONY: setup setup-dev demo an4 test test-slurm lint format fuzz bench gpu soak same-results mutants check-swbd docs clean

setup: $(VENV)/.ready
setup-dev: $(VENV)/.ready-dev

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "ddnn needs Python 3.10 or newer: make PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { \
	  echo "this Python cannot make a virtual environment: installing python3-venv"; \
	  if [ "$$(id -u)" = 0 ]; then apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y python3-venv; \
	  else sudo apt-get update -qq && sudo apt-get install -qq -y python3-venv; fi && $(PYTHON) -m venv --clear $(VENV); \
	} || { rm -rf $(VENV); echo "install python3-venv (Debian, Ubuntu), then run make again" >&2; exit 2; }

# torch first and pinned: what asks for it later takes the one that is there.
$(VENV)/.ready: pyproject.toml ddnn/nn/kernels/kernels.c | $(BIN)/python
	@if [ -n '$(TORCH)' ]; then echo "installing $(TORCH)"; $(PIP) '$(TORCH)'; \
	elif [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null; then \
	  echo "installing torch $(TORCH_VERSION) for the NVIDIA GPU of this machine: 3 GB to download, 5 GB on disk"; \
	  $(PIP) 'torch==$(TORCH_VERSION)'; \
	else \
	  echo "no NVIDIA driver here: installing torch $(TORCH_VERSION) without CUDA, 0.2 GB to download, 1.3 GB on disk"; \
	  $(PIP) 'torch==$(TORCH_VERSION)+cpu' 2>/dev/null \
	  || $(PIP) --retries 0 --timeout 15 --extra-index-url $(CPU_INDEX) 'torch==$(TORCH_VERSION)+cpu' 2>/dev/null \
	  || { echo "no index has that build: installing torch $(TORCH_VERSION) as it is, often 3 GB to download, 5 GB on disk"; \
	       $(PIP) 'torch==$(TORCH_VERSION)'; }; \
	fi
	@echo "installing ddnn and the packages that it needs: some minutes without output"
	$(PIP) -e '.[mpi,decode,report]'
	@echo "ddnn is installed; to use it by name: . $(VENV)/bin/activate"
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(PIP) -e '.[mpi,decode,report,docs,dev]'
	@touch $@

# A corpus that is there stays; all else is in demo/output. The acoustic scale is chosen on the speakers held out in training.
DEMO_SCORE = $(DDNN) score --graph demo/corpus/graph --model demo/corpus/ali/final.mdl
demo: setup
	rm -rf demo/output
	test -e demo/corpus || $(DDNN) synth demo/corpus
	$(DDNN) info demo/corpus/train
	$(DDNN) train recipes/demo/demo.yaml --run-dir demo/output/run
	$(DDNN) evaluate demo/output/run --data demo/corpus/test --alignments demo/corpus/ali_test
	mkdir demo/output/dev
	for f in text utt2spk feats.scp; do grep -f demo/corpus/cv_speakers.txt demo/corpus/train/$$f > demo/output/dev/$$f || exit; done
	sed -i 's# # ../../corpus/train/#' demo/output/dev/feats.scp
	$(DDNN) decode-prep demo/output/run --data demo/output/dev --out demo/output/decode_dev
	$(DEMO_SCORE) demo/output/decode_dev --text demo/output/dev/text --acoustic-scale 0.1,0.2,0.3,0.5 --out demo/output/score_dev
	$(DDNN) decode-prep demo/output/run --data demo/corpus/test --out demo/output/decode
	$(DEMO_SCORE) demo/output/decode --text demo/corpus/test/text --acoustic-scale-from demo/output/score_dev/score.json

AN4 = recipes/an4/corpus
an4: setup
	rm -rf demo/an4
	$(DDNN) train recipes/an4/ng-random.yaml --run-dir demo/an4
	$(DDNN) evaluate demo/an4 --data $(AN4)/test --alignments $(AN4)/ali_test
	$(DDNN) decode-prep demo/an4 --data $(AN4)/test --out demo/an4/decode
	for graph in graph graph_ug; do \
	  $(DDNN) score demo/an4/decode --graph $(AN4)/$$graph --model $(AN4)/ali/final.mdl --text $(AN4)/test/text \
	    --acoustic-scale 0.07,0.1,0.143 --out demo/an4/$$graph || exit; \
	done
	$(BIN)/python recipes/an4/compare.py demo/an4

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 2

test-slurm: setup-dev
	DDNN_TEST_SLURM=1 $(BIN)/python -m pytest tests/slurm/test_real_slurm.py

lint: setup-dev
	$(BIN)/ruff check ddnn tests recipes
	$(BIN)/ruff format --check ddnn tests recipes
	$(BIN)/mypy

format: setup-dev
	$(BIN)/ruff check --fix ddnn tests recipes
	$(BIN)/ruff format ddnn tests recipes

fuzz: setup-dev
	PYTHONPATH=tests:recipes/images $(BIN)/python -m fuzz.run --seconds $(FUZZ_SECONDS)

bench: setup
	$(DDNN) bench

check-swbd: setup
	$(BIN)/python tests/check_swbd.py

# No set-up: it runs with the torch that is there, of .venv or else of PYTHON.
DEVICE ?= cuda
GPU_REPORT ?= gpu-report
gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) tests/gpu.py --device $(DEVICE) --out $(GPU_REPORT) --pip-flags '$(PIP_FLAGS)' $(GPU)

KILLS ?= 200
soak: setup-dev
	DDNN_TEST_EACH_DEATH=1 DDNN_TEST_REAL_PYTHON=1 $(BIN)/python -m pytest tests/training/test_restarts.py
	PYTHONPATH=tests $(BIN)/python tests/training/killing.py --kills $(KILLS)

SAME_RESULTS ?= .same-results.json
same-results: setup-dev
	$(BIN)/python tests/same_results.py $(if $(RECORD),--record,--compare) $(SAME_RESULTS)

MUTANTS ?= --jobs 2
mutants: setup-dev
	$(BIN)/python tests/mutants.py $(MUTANTS)

docs: setup-dev
	$(BIN)/python tests/reference.py
	$(BIN)/python tests/benchmark_plot.py
	PYTHONPATH=tests $(BIN)/python tests/pictures.py
	$(BIN)/python tests/make_notebook.py
	$(BIN)/sphinx-build -q -W --keep-going -c docs . docs/_build
	@echo "the site: docs/_build/docs/index.html"

clean:
	rm -rf $(VENV) demo/output demo/an4 build dist .pytest_cache .mypy_cache .ruff_cache
