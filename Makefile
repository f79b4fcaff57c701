# make demo   capture with the bundled model and print the tables
# make test   the whole test suite, linters and type checks included
# Both make their own virtual environment in .venv and install into it.

VENV := .venv
BIN := $(VENV)/bin
INPUTS := pyproject.toml constraints.txt

.PHONY: demo test browser clean

demo: $(VENV)/demo.stamp
	@$(BIN)/moetap capture --model tiny-qwen3_5-moe --quick --temp 0.8 --seed 1 --max-tokens 128 --force -o traces/demo.h5
	@$(BIN)/moetap info traces/demo.h5
	@$(BIN)/moetap analyze traces/demo.h5
	@echo "The tiny model was sampled (temperature 0.8, fixed seed): decoded greedily a model of this size"
	@echo "falls into loops, and a loop repeats its routing. A real model: moetap capture --model DIR_OR_ID"

test: $(VENV)/test.stamp browser
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python prompts/check.py
	$(BIN)/pytest

# The HTML report is tested in a real browser. Without one, and without the right to install Debian's,
# these tests are skipped and say so.
browser:
	@for b in "$$MOETAP_BROWSER" chromium chromium-browser google-chrome chrome \
	    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"; do \
	    command -v "$$b" >/dev/null 2>&1 && exit 0; \
	done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
	    echo "installing chromium"; \
	    apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium >/dev/null; \
	else \
	    echo "no Chromium or Chrome: the browser tests of the report will be skipped"; \
	fi

# uv where it is installed (it also brings a Python), else the first Python that is new enough.
$(VENV)/bin/python:
	@if command -v uv >/dev/null 2>&1; then \
	    uv venv --quiet --seed --python '>=3.11' $(VENV); \
	else \
	    for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	        if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	            echo "using $$p"; exec $$p -m venv $(VENV); \
	        fi; \
	    done; \
	    echo "moetap needs Python 3.11 or newer and found none." >&2; \
	    echo "macOS:  brew install python   or   curl -LsSf https://astral.sh/uv/install.sh | sh" >&2; \
	    echo "Debian: apt install python3 python3-venv" >&2; \
	    exit 1; \
	fi

# $(call install,REQUIREMENT)
define install
	@echo "installing $(1) into $(VENV)"
	@if command -v uv >/dev/null 2>&1; then \
	    uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '$(1)'; \
	else \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '$(1)'; \
	fi
	@touch $@
endef

$(VENV)/demo.stamp: $(VENV)/bin/python $(INPUTS)
	$(call install,.)

$(VENV)/test.stamp: $(VENV)/bin/python $(INPUTS)
	$(call install,.[dev])

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
