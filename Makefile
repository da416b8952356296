# hpctrain: `make help` lists what there is. Each target does its own set-up: it installs the Debian packages that it
# needs where you are root, saying which, and says what to install where you are not.

PYTHON ?= $(firstword $(wildcard /usr/bin/python3.11) python3.11)
FLAVOR ?= cpu
MPI := openmpi
NAME := $(FLAVOR)$(if $(filter-out openmpi,$(MPI)),-$(MPI))
ROOTFS := build/cluster/rootfs
TAR := build/hpctrain-$(NAME).tar
SIF := hpctrain-$(NAME).sif
RECIPE := containers/Dockerfile $(wildcard containers/install/* containers/locks/* containers/patches/*) pyproject.toml LICENSE
PACKAGE := $(shell find src -type f ! -name '*.pyc' ! -path '*.egg-info/*')
# Apptainer of this machine, or the one in the file system of the test cluster.
APPTAINER := $(if $(shell command -v apptainer || command -v singularity),,$(ROOTFS)/etc/hpctrain-rootfs)

.PHONY: help demo test test-fast test-cuda test-mpich .test-tools lint benchmark image base sif push sif-from-def sbom verify reproduce venv cluster lock \
    lock-check clean
.DELETE_ON_ERROR:

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

demo: sif cluster  ## train from the container on a two-node Slurm cluster on this machine
	@command -v python3 >/dev/null || containers/need.sh python3
	PYTHONPATH=tests python3 tests/demo.py

# Two at once, as half the time of a job is waiting. The tests of a file share what they set up.
test: venv sif cluster .test-tools  ## every test there is, on real parts
	.venv/bin/python -m pytest -n 2 --dist loadfile $(PYTEST)

test-fast: venv .test-tools  ## the tests that need no image and no cluster
	.venv/bin/python -m pytest -m 'not slow' $(PYTEST)

# networks, file systems and small libraries for the tests of hpctrain check
.test-tools:
	@command -v ip >/dev/null && command -v mkfs.btrfs >/dev/null && command -v tcc >/dev/null && command -v openssl >/dev/null || \
		containers/need.sh iproute2 btrfs-progs tcc openssl

test-mpich: venv cluster  ## the image with MPICH, and other MPIs of its ABI in its place, on the cluster
	$(MAKE) sif MPI=mpich
	.venv/bin/python -m pytest tests/mpich.py $(PYTEST)

test-cuda: venv cluster  ## the image of FLAVOR=cu130 or cu126 on the cluster, with ranks on CPUs
	$(MAKE) sif
	FLAVOR=$(FLAVOR) .venv/bin/python -m pytest tests/cuda_images.py $(PYTEST)

lint: venv  ## ruff and shellcheck
	.venv/bin/python -m pytest -q tests/test_lint.py

benchmark: venv sif cluster  ## a training step and the way to it in the container and outside; texts (NSMC=FOLDER) in four ways
	.venv/bin/python benchmarks/container.py
	.venv/bin/python benchmarks/launch.py
	.venv/bin/python benchmarks/nlp.py $(if $(NSMC),--data $(NSMC))

image: $(TAR)  ## the image, by docker, podman or buildah; MPI=mpich for one with MPICH

base: build/base-bookworm.tar  ## a Debian base image from a Debian mirror, where no registry can be reached

sif: $(SIF)  ## hpctrain-cpu.sif from the image

sbom: $(TAR)  ## what the image consists of, anew from it: build/hpctrain-cpu.spdx.json
	containers/record.py sbom $(TAR) >$(TAR:.tar=.spdx.json.new)
	mv $(TAR:.tar=.spdx.json.new) $(TAR:.tar=.spdx.json)

verify:  ## whether IMAGE= (a SIF, an archive, a name) is what its record says, or RECORD=FILE
	@containers/record.py verify "$(or $(IMAGE),$(SIF))" $(RECORD)

push: $(if $(REGISTRY),$(TAR))  ## the image to a registry: REGISTRY=localhost:5000/hpctrain
	@command -v skopeo >/dev/null || containers/need.sh skopeo
	containers/push.sh $(if $(REGISTRY),--registry '$(REGISTRY)') --flavor $(TAR:build/hpctrain-%.tar=%)

reproduce: $(APPTAINER)  ## build image and SIF twice from nothing, and compare them
	@command -v buildah >/dev/null || containers/need.sh buildah
	containers/reproduce.sh --flavor $(FLAVOR) --mpi $(MPI)

sif-from-def: $(APPTAINER)  ## hpctrain-cpu.sif from apptainer/hpctrain.def, with no Docker anywhere
	@command -v curl >/dev/null || containers/need.sh curl
	apptainer/build.sh --from def --flavor $(FLAVOR) --mpi $(MPI)

venv: .venv/ready  ## .venv with the same locked packages as the image, and the tools of the tests

cluster: $(ROOTFS)/etc/hpctrain-rootfs  ## the root file system of the test cluster

lock: venv  ## containers/locks anew: wheels from pyproject.toml, and what Debian would install today
	@command -v mmdebstrap >/dev/null || containers/need.sh mmdebstrap
	containers/lock.sh
	containers/lock.sh --debian

lock-check: venv  ## whether containers/locks are what pyproject.toml asks for
	containers/lock.sh --check
	containers/lock.sh --check --flavor cu130 --platform aarch64
	containers/lock.sh --check --flavor cu130-build --platform aarch64

clean:  ## remove what make has made (not runs/)
	rm -rf --one-file-system build .venv $(SIF)

$(TAR): $(RECIPE) $(PACKAGE) containers/build.sh containers/base.sh containers/lib.sh containers/record.py
	@command -v curl >/dev/null || containers/need.sh curl
	@docker info >/dev/null 2>&1 || command -v podman >/dev/null || containers/need.sh buildah
	containers/build.sh --flavor $(FLAVOR) --mpi $(MPI)

build/base-bookworm.tar: containers/base.sh
	containers/base.sh --force

$(SIF): $(TAR) apptainer/build.sh apptainer/hpctrain.def containers/sif.py | $(APPTAINER)
	apptainer/build.sh --from image --flavor $(FLAVOR) --mpi $(MPI)

$(ROOTFS)/etc/hpctrain-rootfs: tests/cluster/rootfs.sh
	@command -v mmdebstrap >/dev/null || containers/need.sh mmdebstrap
	tests/cluster/rootfs.sh $(ROOTFS)
	@touch $@

.venv/ready: containers/locks/cpu.lock containers/install/python.sh pyproject.toml
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || containers/need.sh python3.11-venv
	rm -rf .venv
	PYTHON=$(PYTHON) containers/install/python.sh .venv cpu
	.venv/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	.venv/bin/pip install --quiet --editable '.[dev]'
	@touch $@
