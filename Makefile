# Everything a newcomer or CI needs; `make help` lists it. Needs Python >= 3.11 with venv, and make.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=
QUICK := not dist and not s3 and not hf and not e2e

# One math thread per rank: more only make ranks wait for each other.
export OMP_NUM_THREADS ?= 1
# Every rank is a process: without cached bytecode each of thousands would compile the project again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup check fix test test-dist coverage mutants matrix release reshard-matrix experts site fuzz chat zoo peer-tests faults faults-debug hangs healthy random-keys hostile stores wrong-inputs loops phones soak arena bench gpu demo docs screens wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Install torch first, at its exact version, so that no dependency pulls in another build.
$(READY): pyproject.toml constraints.txt setup.py debug/record/_ring.c
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("titan-ckpt needs Python >= 3.11: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the versions of constraints.txt into $(VENV) ..."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(READY) ## create .venv with all dependencies (other targets do so when needed)

check: $(READY) ## ruff, mypy --strict, import-linter, vulture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p titan_ckpt
	$(BIN)/mypy tests tools scripts benchmarks examples
	$(BIN)/lint-imports
	$(BIN)/vulture

fix: $(READY) ## format, and apply ruff's automatic fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: $(READY) ## all tests, including real processes and a real S3 server (ARGS="-k name")
	$(BIN)/python -m pytest $(ARGS)

test-dist: $(READY) ## only tests that start several processes or a server
	$(BIN)/python -m pytest -m "dist or s3 or e2e" $(ARGS)

coverage: $(READY) ## the quick tests under coverage.py; fails below the floor in pyproject.toml
	$(BIN)/python -m pytest -m "$(QUICK)" --cov --cov-report=term $(ARGS)

mutants: $(READY) ## put small faults into the code and count those that no test notices (ARGS="--count 40 --seed 1")
	$(BIN)/python -m tools.mutants $(ARGS)

matrix: ## install and test on every Python here and each torch (ARGS="--laptop" or "--json FILE"; minutes each)
	$(PYTHON) -m tools.matrix $(ARGS)

release: $(READY) ## check, build and try out a release; publishes nothing (ARGS="--no-tests" for a first look)
	$(BIN)/python -m tools.release $(ARGS)

reshard-matrix: $(READY) ## train on each of 11 meshes, reshard to each, resume: bit-equal losses (minutes)
	$(BIN)/python -m benchmarks.resharding.reshard_matrix
	$(BIN)/python -m benchmarks.resharding.reshard_matrix --mixture

experts: $(READY) ## train mixtures on meshes of 2, 4 and 8 ranks: the losses and experts of one process (minutes)
	$(BIN)/python -m benchmarks.training.expert_campaign $(ARGS)

fuzz: $(READY) ## fuzz all that reads bytes of others, 20 minutes a family (ARGS="--family manifest --minutes 5")
	$(BIN)/python -m scripts.fuzz $(ARGS)

chat: $(READY) ## compare 1,000 conversations of 5 chat templates token by token with transformers and TRL (ARGS="1000 1": count, seed)
	$(BIN)/python -m tools.chat.compare $(ARGS)
	$(BIN)/python -m tools.chat.with_trl $(ARGS)

zoo: $(READY) ## save and load several hundred kinds of states, by us and by DCP, and compare (ARGS="Adam" for a part)
	$(BIN)/python -m tools.zoo $(ARGS)

peer-tests: $(READY) ## PyTorch's own checkpoint tests with its storage and with ours (ARGS="--tests FOLDER --part NAME"; 15 minutes)
	$(BIN)/python -m tools.peer_tests $(ARGS)

faults: $(READY) ## kill saves, fail store calls in turn and at random, damage every file: docs/reliability.md (40 minutes)
	$(BIN)/python -m scripts.faults --kills 200
	$(BIN)/python -m scripts.faults --kills 100 --s3
	$(BIN)/python -m scripts.faults --kills 24 --s3 --client s3fs
	$(BIN)/python -m scripts.faults --matrix
	$(BIN)/python -m scripts.faults --one-rank
	$(BIN)/python -m scripts.faults --random 5000
	$(BIN)/python -m scripts.faults --tiers 500
	$(BIN)/python -m scripts.faults --damage 150
	$(BIN)/python -m scripts.faults --power-cuts 1000

faults-debug: $(READY) ## hang real jobs in every known way and diagnose each (ARGS="--ranks 2,4,8 --runs 3")
	$(BIN)/python -m titan_ckpt.debug.drill.campaign $(ARGS)

hangs: $(READY) ## run what users do wrong (and right) in real jobs, diagnose each form of evidence (ARGS="NAME --keep FOLDER")
	$(BIN)/python -m tools.hangs $(ARGS)

healthy: $(READY) ## look at healthy live jobs of 20 kinds: nobody may be accused (ARGS="--looks 20 --seconds 15 --kinds ddp,fsdp2")
	$(BIN)/python -m tools.healthy.campaign $(ARGS)

random-keys: $(READY) ## press random keys on the screens over every recording: no key may end the program (ARGS="FOLDER --seconds 600")
	$(BIN)/python -m tools.random_keys $(ARGS)

hostile: $(READY) ## campaigns against hostile files, links, servers and process tables (ARGS="deletion --minutes 5 --seed 1")
	$(BIN)/python -m scripts.hostile $(ARGS)

stores: $(READY) ## the contract of a store on Azurite (AZURITE=PATH of azurite-blob)
	$(BIN)/python -m tools.cloud_servers -- $(BIN)/python -m pytest tests/store/test_contract.py -k az $(ARGS)

wrong-inputs: $(READY) ## some 1,300 wrong command lines: one line that names the mistake, and the exit code (ARGS="--only reshard")
	$(BIN)/python -m tools.wrong_inputs.campaign $(ARGS)

loops: $(READY) ## the tests of loops whose libraries are installed for this alone: torchtitan, Lightning (ARGS="-k random")
	$(BIN)/python -m tools.loops $(ARGS)

phones: $(READY) ## install the extra `examples`, cluster 1,000 photographs on simulated phones: docs/phones.md (root, 15 minutes)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[examples]'
	$(BIN)/python -m pytest tests/phones
	$(BIN)/python -m examples.phones.pictures .phones
	$(BIN)/python -m examples.phones.measure .phones --out .phones/results.jsonl --runs "all:4;unmodified:4;all:1;unmodified:1" --faults

soak: $(READY) ## an hour of training, kills, reshards and prunes over a faulty network (ARGS="--minutes 5 --seed 1")
	$(BIN)/python -m scripts.soak $(ARGS)

arena: $(READY) ## score this and other tools on recorded incidents: docs/arena.md (ARGS="--folder F --tool NAME=COMMAND")
	$(BIN)/python -m benchmarks.diagnosis.arena $(ARGS)

bench: $(READY) ## run all benchmarks that fit this machine, with peers: docs/performance.md (ARGS="--quick" or "--only core_local")
	$(BIN)/python -m benchmarks.suite $(ARGS)

gpu: $(READY) ## all that needs a GPU, on one GPU, within 40 minutes, with a report in .bench/gpu (ARGS="--titan PYTHON", or --tiny on a CPU)
	$(BIN)/python -m benchmarks.gpu $(ARGS)

demo: $(READY) ## train, kill, resume, reshard, convert, hang and debug (ARGS=--json for results as JSON)
	rm -rf .demo
	$(BIN)/python -m titan_ckpt demo --dir .demo $(ARGS)

docs: $(READY) ## write docs/cli.md, settings.md, api.md, the reports of docs/verdicts and the picture of the rooms
	$(BIN)/python -m scripts.write_docs
	$(BIN)/python -m tools.architecture.picture

site: $(READY) ## build the documentation as a searchable site in .site/ (needs no network; ARGS="--site-dir FOLDER")
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict $(ARGS)

screens: $(READY) ## write every screen of every recording, at four sizes, dark and light (ARGS="--gallery FOLDER")
	$(BIN)/python -m scripts.screenshots $(or $(ARGS),--gallery .screens)

wheel: $(READY) ## build the wheel and the source archive in dist/
	$(BIN)/python -m build --quiet --outdir dist

clean: ## remove build products and caches, keep .venv
	rm -rf build dist .demo .screens .site .loops .trl .phones .matrix .mutants .release .coverage *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
