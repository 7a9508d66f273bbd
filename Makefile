# Each target sets up what it needs in .venv, from the versions pinned in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LAB := $(VENV)/.lab

.PHONY: bench bench-lab bench-matrix browser demo docs evidence-page test test-long test-versions test-gpu sanitize lint clean
.DELETE_ON_ERROR:

demo: $(LAB)  ## five tuned optimizers on a physics-informed network, to a table, a picture and a page
	$(BIN)/adabayes reproduce --protocol demo --jobs 2
	$(BIN)/adabayes report out/demo --figures

test: $(READY) browser  ## everything that must hold, in 13 minutes on 2 cores
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist loadfile  # threads that spin would get in each other's way

evidence-page: $(READY)  ## the page of the records in evidence/ and the docs' figures, without training: build/evidence/index.html
	$(BIN)/adabayes suite --from evidence --out build/evidence
	cp build/evidence/evidence.png build/evidence/summary.png docs/images/

docs: $(READY)  ## the site: build/docs/index.html
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs
	@echo "The site: build/docs/index.html"

browser:  # for the tests of pages: Debian's Chromium, if it is not there and can be had
	@if command -v chromium || command -v chromium-browser || command -v google-chrome; then exit 0; fi; \
	if command -v apt-get >/dev/null && test "$$(id -u)" = 0; then \
	    echo "There is no Chromium, which the tests of pages need: apt-get installs the system package chromium."; \
	    if apt-get update -qq && apt-get install -y -qq chromium; then exit 0; fi >/dev/null; \
	fi; \
	echo "There is no Chromium, and it cannot be installed from here: tests in the browser are skipped, those of" \
	    "reports and of the explorer (tests/lab/test_report.py, tests/lab/test_theory.py)."

test-long: $(READY)  ## what takes longer: 30 kills, deaths at every file operation, damaged files, compiled training, Ctrl-C on Ray; half an hour
	$(BIN)/pytest -m long

test-gpu: $(READY)  ## the GPU's kernel without a GPU: every variant interpreted, compiled, emulated; a quarter of an hour
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "long or not long" tests/kernels/triton
	$(BIN)/adabayes doctor --gpu

bench-lab: $(READY)  ## the lab's batches and training loop against the usual ones, 2 minutes
	$(BIN)/python benchmarks/lab.py

bench: $(READY)  ## time a step against torch's optimizers: 1 and 2 threads, 10 minutes
	$(BIN)/adabayes bench --threads 1
	$(BIN)/adabayes bench --threads 2

bench-matrix: $(READY)  ## AdaBayes-K against SOAP and Muon, and in a whole training step: half an hour
	for threads in 1 2; do $(BIN)/adabayes bench --matrix --threads $$threads; \
	    $(BIN)/python benchmarks/training_step.py --threads $$threads; done

test-versions:  ## the tests under the oldest and the newest torch and Python of pyproject (downloads 6 GB)
	PYTHON_OLDEST="$(PYTHON_OLDEST)" PYTHON_NEWEST="$(PYTHON_NEWEST)" tests/versions.sh

SANITIZED := -O1 -g -std=c11 -shared -fPIC -pthread -DPLAIN -ffp-contract=off -fsanitize=address,undefined -fno-sanitize-recover
sanitize: $(READY)  ## the kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer (gcc; a few minutes)
	rm -f $(READY)  # the next target builds the real kernels again
	gcc $(SANITIZED) -o src/adabayes/kernels/cpu/_fused.so src/adabayes/kernels/cpu/*.c -lm
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
	    $(BIN)/pytest -q -s -p no:cacheprovider tests/kernels/test_*.py tests/optim/test_low_precision.py tests/optim/test_saved_by_0_1.py tests/optim/test_adabayes_k.py \
	    -k "not compiled and not orthonormal"

lint: $(READY)  ## put the code into its form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist out .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable
SOURCES := pyproject.toml constraints.txt hatch_build.py $(wildcard src/adabayes/kernels/cpu/*.[ch])

$(LAB): $(SOURCES)  # the lab, without what only tests need
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[lab]'
	touch $@

$(READY): $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[dev]'
	touch $(LAB) $@
