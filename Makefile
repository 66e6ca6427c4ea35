# Every target does all its own set-up. PYTHON=... chooses the interpreter, ARGS=... goes to what is run, WORKERS=... is how
# many tests run at a time. Tests mostly wait for a peer, but 8 on two cores were no faster than 6: those keep both busy.
# With many, tests with a battery of seconds starve.
.POSIX:
.SUFFIXES:
WORKERS = 6
# One process compiles the tests meanwhile, or each worker would: 15 s of a processor each.
COMPILE = env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -m pytest --collect-only -q >/dev/null 2>&1
CHECKED = tests/core tests/settings tests/ups/profiles tests/test_tidy.py tests/test_yamlfile.py tests/test_wire.py tests/test_options.py
.PHONY: help demo check test test-long test-vm test-gpu bench docs clean

help:
	@echo 'make demo       an outage from "battery" to power-off, simulated on real protocols (a minute, no root, no hardware)'
	@echo 'make check      style, types, directions, and what the core decides: four minutes, for each change'
	@echo 'make test       that, and every other test that a fresh machine can run in 10 to 20 minutes on two cores'
	@echo 'make test-long  the slow tests, other random examples, another Python, and the mutation score of the core: hours'
	@echo 'make test-vm    the tests that boot containers and virtual machines'
	@echo 'make test-gpu   the tests that need a GPU, with a Python that has PyTorch: 8 minutes'
	@echo 'make bench      the figures of the README, measured here'
	@echo 'make docs       the documents as a site with search, in build/site'
	@echo 'make clean      remove all that the other targets made'

demo:
	scripts/venv .venv
	.venv/bin/powerguard demo $(ARGS)

check:
	scripts/venv .venv test
	scripts/style
	scripts/tests .venv/bin/python -n 2 --dist loadgroup $(CHECKED) $(ARGS)

test:
	scripts/venv .venv test
	scripts/test-peers || echo 'Going on without them: their tests are skipped and named at the end.'
	$(COMPILE) & scripts/style; status=$$?; wait; exit $$status
	scripts/tests .venv/bin/python -n $(WORKERS) --dist loadgroup $(ARGS)
	set -- $(ARGS); test $$# -gt 0 || scripts/test-torch --if-changed
	@echo 'Not run: what boots containers and virtual machines (make test-vm), and what takes minutes (make test-long).'

test-long:
	scripts/venv .venv test
	scripts/test-peers --browser || echo 'Going on without them: their tests are skipped and named at the end.'
	scripts/marked slow $(ARGS)
	set -- $(ARGS); test $$# -gt 0 || scripts/hunt 10 -n 2
	set -- $(ARGS); test $$# -gt 0 || scripts/test-torch
	set -- $(ARGS); test $$# -gt 0 || scripts/test-torch -m slow -o faulthandler_timeout=6000
	set -- $(ARGS); test $$# -gt 0 || scripts/test-system
	scripts/mutation

test-vm:
	scripts/venv .venv test
	scripts/test-peers --vm || echo 'Going on without them: their tests are skipped and named at the end.'
	scripts/marked vm $(ARGS)

test-gpu:
	scripts/test-gpu $(ARGS)

bench:
	scripts/venv .venv test
	.venv/bin/python -m bench $(ARGS)

docs:
	scripts/venv .venv docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet $(ARGS)
	@echo 'Open build/site/index.html, or serve it: .venv/bin/mkdocs serve'

clean:
	rm -rf .venv .venv-mutation .venv-system .venv-torch build dist mutants .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
