# hpctrain: `make help` lists the targets. Each target sets up what it needs. As root it installs missing Debian
# packages and prints their names; for other users it stops with the command that installs them.

FLAVOR ?= cpu
MPI := openmpi
NAME := $(FLAVOR)$(if $(filter-out openmpi,$(MPI)),-$(MPI))
ROOTFS := build/cluster/rootfs
TAR := build/hpctrain-$(NAME).tar
SIF := hpctrain-$(NAME).sif
SQSH := $(SIF:.sif=.sqsh)
RECIPE := containers/Dockerfile containers/check_image.sh pyproject.toml LICENSE \
    $(wildcard containers/install/* containers/locks/* containers/patches/*)
BUILD_SCRIPTS := containers/build_image.sh containers/build_base.sh containers/build_functions.sh \
    $(wildcard containers/*.py)
PACKAGE := $(shell find src -type f ! -name '*.pyc' ! -path '*.egg-info/*')
# With no Apptainer on this machine, the SIF needs the one in the file system of the test cluster.
APPTAINER := $(if $(shell command -v apptainer || command -v singularity),,$(ROOTFS)/etc/hpctrain-rootfs)
# Only root can build that one. For others a prerequisite fails before an image is built for nothing.
NO_APPTAINER := $(if $(APPTAINER),$(if $(filter-out 0,$(shell id -u)),.no-apptainer))
# What the builds need on this machine, as one list: buildah without docker and podman, mmdebstrap for a base image
# that no registry gives, and for the root file system of the cluster.
HOST_PACKAGES = curl python3 $(if $(APPTAINER),mmdebstrap) \
    $$(docker info >/dev/null 2>&1 || command -v podman >/dev/null || echo buildah) \
    $$([ -n "$$BASE_IMAGE" ] || [ -s build/base-bookworm.tar ] || \
        curl -s -m 5 -o /dev/null https://registry-1.docker.io/v2/ || echo mmdebstrap)

BEGAN := $(shell date +%s)

.PHONY: help address docs demo install test test-all test-fast test-cuda test-mpich test-gpu faults soak mutants .room .no-apptainer .prefix \
    .test-tools lint benchmark image base sif sqsh push sif-from-def sbom verify reproduce venv cluster lock lock-check audit clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@sed -n -e 's/^##@ \(.*\)/\n\1/p' -e 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

##@ Try and test

demo: .room $(NO_APPTAINER)  ## train from the container on a Slurm cluster of two nodes on this machine
	+@$(call build_quietly,sif cluster)
	python3 cluster/demo.py

# Test files run side by side, in the order of conftest.py, because tests wait for a part of their time. The tests of
# a file share fixtures. A third process of slow tests gains nothing on two cores: it starts a third cluster.
PYTEST_SLOW := .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=20

test-fast: venv .test-tools  ## run the tests that need neither the image nor the cluster
	.venv/bin/python -m pytest -m 'not slow' -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations=20 $(PYTEST)

test: .room  ## also build image and cluster, and test what the README promises; PYTEST= adds options of pytest
	+@$(call build,sif venv cluster test-fast)
	$(PYTEST_SLOW) -m 'slow and main_road' $(PYTEST)
	@$(call print_time,$@)

test-all: .room  ## run all tests
	+@$(call build,sif venv cluster test-fast)
	$(PYTEST_SLOW) -m slow $(PYTEST)
	@$(call print_time,$@)

test-mpich: venv cluster  ## build the image with MPICH and test it, also with other MPIs of its ABI
	$(MAKE) sif MPI=mpich
	.venv/bin/python -m pytest tests/containers/mpich.py $(PYTEST)

test-cuda: venv cluster  ## build the image of FLAVOR=cu130 or cu128 and test it with ranks on CPUs
	$(MAKE) sif
	FLAVOR=$(FLAVOR) .venv/bin/python -m pytest tests/containers/cuda.py $(PYTEST)

test-gpu:  ## check and measure on one GPU all that needs one, in the SIF (FLAVOR=cu130 or cu128, NSMC=FOLDER)
	apptainer exec --nv $(SIF) python benchmarks/gpu.py $(if $(NSMC),--data $(NSMC))

faults: venv sif cluster .test-tools  ## let every fault of tests/tools/faults.py happen to a job; takes two hours
	.venv/bin/python tests/tools/faults.py $(if $(ONLY),--only '$(ONLY)')

soak: venv sif cluster  ## train for MINUTES=20 with a random fault each minute; SEED=1
	.venv/bin/python tests/tools/faults.py --soak $(or $(MINUTES),20) --seed $(or $(SEED),1)

mutants: venv .test-tools  ## make mistakes, one at a time, and see whether tests notice; ONLY=run/best.py; takes half an hour
	.venv/bin/python tests/tools/mutants.py $(if $(ONLY),--only '$(ONLY)')

address:  ## write URL=https://..., the address of this repository, into the pages
	@[ -n "$(URL)" ] || { echo "make address: give URL=https://..." >&2; exit 2; }
	git grep -lF https://example.org/hpctrain -- ':!Makefile' | xargs sed -i 's#https://example.org/hpctrain#$(URL)#g'

lint: venv  ## run ruff, mypy, shellcheck and the other checks of source files
	.venv/bin/python -m pytest -q tests/test_lint.py tests/test_options.py

benchmark: venv sif cluster  ## measure container against bare node, job start-up, checkpoints, and text training (NSMC=FOLDER)
	.venv/bin/python benchmarks/container.py
	.venv/bin/python benchmarks/launch.py
	.venv/bin/python benchmarks/checkpoint.py
	.venv/bin/python benchmarks/restart.py
	.venv/bin/python benchmarks/nlp.py $(if $(NSMC),--data $(NSMC))

# Build these targets, two at a time: each leaves a core idle for half of its time. Each prints its output when it ends,
# so that the lines of two do not mix.
build = $(MAKE) --question --no-print-directory $(filter-out test-fast,$(1)) 2>/dev/null || \
	    echo 'Building $(1), two at a time; each prints its output when it ends.'; \
	exec $(MAKE) --jobs=2 --output-sync=target --no-print-directory $(1)

# The same with all output in build/make.log, and a line for each step: those of buildah, podman and docker, what our
# scripts have made, and their errors, as the other target may go on for minutes. After a failure the end of the log is
# printed.
STEPS := (\[[0-9]+\/[0-9]+\] )?STEP [0-9]|\#[0-9]+ \[|(base|build|[a-z_]+\.sh): |python3 -m venv
build_quietly = $(MAKE) --question --no-print-directory $(1) 2>/dev/null || { \
	    mkdir -p build; rm -f build/make.failed; \
	    echo 'Building $(1), two at a time; all output is in build/make.log.'; \
	    { $(MAKE) --jobs=2 --no-print-directory $(1) </dev/null 2>&1 || touch build/make.failed; } | \
	        tee build/make.log | sed -unE 's/^(($(STEPS)).{0,90}).*/  \1/p'; \
	    [ ! -e build/make.failed ] || { tail -n 20 build/make.log >&2; exit 1; }; }

print_time = seconds=$$(($$(date +%s) - $(BEGAN))); echo "make $(1) took $$((seconds / 60)) min $$((seconds % 60)) s"

.no-apptainer:
	@echo "make: apptainer and singularity are not installed here; install one, or copy a SIF from where you built it" >&2
	@exit 1

.prefix:
	@launch/modulefiles/install.sh '$(PREFIX)'

# On a full disk every test after the first large ones would fail in its own way.
.room:
	@free=$$(df -Pk . | awk 'END { print int($$4 / 1000000) }'); [ -e $(SIF) ] || [ "$$free" -ge 20 ] || { \
	    echo "make: the image, the cluster and the tests need 20 GB on the disk of $(CURDIR), which has" \
	    "$$free GB free: free some" >&2; exit 1; }

# networks, file systems and small libraries for the tests of hpctrain check; a reader of modulefiles; a browser;
# torch.compile
.test-tools: venv
	@command -v ip >/dev/null && command -v mkfs.btrfs >/dev/null && command -v tcc >/dev/null && command -v openssl >/dev/null && \
		command -v chromium >/dev/null && [ -e /usr/share/lmod/lmod/libexec/lmod ] && command -v g++ >/dev/null && \
		{ [ -e /usr/include/python3.11/Python.h ] || [ ! -e .venv/lib/python3.11 ]; } || \
		containers/install_host_packages.sh iproute2 btrfs-progs tcc openssl lmod chromium g++ \
		    $$([ ! -e .venv/lib/python3.11 ] || echo python3.11-dev)
	@# a fault of Debian's Python 3.11
	@[ ! -e .venv/lib/python3.11 ] || [ -e .venv/lib/python3.11/site-packages/hpctrain_fork_lock.so ] || \
		containers/install/fork_lock.sh .venv

##@ Build

image: $(TAR)  ## build the image with docker, podman or buildah; FLAVOR=cu130, MPI=mpich for others

sif: $(NO_APPTAINER) $(SIF)  ## build hpctrain-cpu.sif from the image

sqsh: $(NO_APPTAINER) $(SQSH)  ## make hpctrain-cpu.sqsh from the SIF, for Pyxis and enroot

sif-from-def: $(NO_APPTAINER) $(APPTAINER)  ## build hpctrain-cpu.sif from apptainer/hpctrain.def, without docker, podman or buildah
	@containers/install_host_packages.sh curl python3
	apptainer/build_sif.sh --from def --flavor $(FLAVOR) --mpi $(MPI)

base: build/base-bookworm.tar  ## build a Debian base image from a Debian mirror, where no registry can be reached

venv: .venv/ready  ## make .venv with the image's packages and the tools of the tests; PYTHON=python3.13 for another

cluster: $(ROOTFS)/etc/hpctrain-rootfs  ## build the root file system of the test cluster

##@ Verify and publish

verify:  ## compare IMAGE= (a SIF, an archive, an image name) with its record, or with RECORD=FILE
	@containers/record.py verify "$(or $(IMAGE),$(SIF))" $(RECORD)

sbom: $(TAR)  ## write the SBOM of the image again: build/hpctrain-cpu.spdx.json
	containers/record.py sbom $(TAR) >$(TAR:.tar=.spdx.json.new)
	mv $(TAR:.tar=.spdx.json.new) $(TAR:.tar=.spdx.json)

reproduce: $(NO_APPTAINER) $(APPTAINER)  ## build image and SIF twice from nothing and compare them
	@containers/install_host_packages.sh buildah $(HOST_PACKAGES)
	containers/reproduce.sh --flavor $(FLAVOR) --mpi $(MPI)

push: $(if $(REGISTRY),$(TAR))  ## push the image to a registry: REGISTRY=localhost:5000/hpctrain
	@containers/install_host_packages.sh skopeo
	containers/push.sh $(if $(REGISTRY),--registry '$(REGISTRY)') --flavor $(FLAVOR) --mpi $(MPI)

install: .prefix sif  ## install for all users of a site: launch scripts, SIF and modulefiles in PREFIX=
	launch/modulefiles/install.sh '$(PREFIX)' $(SIF)

##@ Maintain

docs: build/docs/ready  ## build a site of the pages, with search, in build/site
	build/docs/bin/mkdocs build --strict --site-dir build/site
	@echo 'To read it: python3 -m http.server --directory build/site'

build/docs/ready: docs/site.lock
	@python3 -c 'import ensurepip, venv' 2>/dev/null || containers/install_host_packages.sh python3-venv
	python3 -m venv --clear build/docs
	build/docs/bin/python -m pip install --quiet --require-hashes -r $<
	@touch $@

lock: venv  ## write containers/locks: wheels for pyproject.toml, and today's versions of Debian
	@containers/install_host_packages.sh mmdebstrap
	containers/lock.sh
	containers/lock.sh --debian

lock-check: venv  ## check that containers/locks match pyproject.toml
	containers/lock.sh --check
	containers/lock.sh --check --flavor cu130 --platform aarch64
	containers/lock.sh --check --flavor cu130-build --platform aarch64

# A patch closes the holes that its own text names.
audit: venv  ## list the packages in locks that have a known hole, by osv.dev
	@status=0; for lock in $$(grep -l -e --hash containers/locks/*.lock) tests/dev.lock docs/site.lock; do \
		echo "$$lock:"; \
		.venv/bin/uv tool run pip-audit==2.10.1 --vulnerability-service osv --disable-pip --progress-spinner off --requirement $$lock \
		    $$(grep -ohE 'CVE-[0-9]+-[0-9]+' containers/patches/*.patch | sort -u | sed 's/^/--ignore-vuln /') || status=1; \
	done; exit $$status

clean:  ## remove build/, .venv and the SIF and squashfs file of FLAVOR that make has built, but not runs/
	rm -rf --one-file-system build $(SIF) $(SIF).digest $(SQSH) $(SQSH).digest $(and $(wildcard .venv/ready .venv.unfinished),.venv .venv.unfinished)

$(TAR): $(RECIPE) $(PACKAGE) $(BUILD_SCRIPTS)
	@containers/install_host_packages.sh $(HOST_PACKAGES)
	containers/build_image.sh --flavor $(FLAVOR) --mpi $(MPI)

build/base-bookworm.tar: containers/build_base.sh
	containers/build_base.sh --force

$(SIF): $(TAR) apptainer/build_sif.sh apptainer/hpctrain.def | $(APPTAINER)
	apptainer/build_sif.sh --from image --flavor $(FLAVOR) --mpi $(MPI)

$(SQSH): $(SIF) containers/build_sqsh.sh | $(APPTAINER)
	containers/build_sqsh.sh --flavor $(FLAVOR) --mpi $(MPI)

$(ROOTFS)/etc/hpctrain-rootfs: cluster/build_rootfs.sh
	@containers/install_host_packages.sh mmdebstrap
	cluster/build_rootfs.sh $(ROOTFS)
	@touch $@

.venv/ready: $(addprefix containers/locks/,cpu.lock openmpi.lock venv.lock) tests/dev.lock containers/install/python.sh \
    containers/venv.sh pyproject.toml
	containers/venv.sh
