#!/bin/bash
# What the image needs of Debian, and its user. Run as root, in the image.
set -euo pipefail

# gcc and libc6-dev: kernels for the CPU at hand are compiled at their first use, and triton compiles what starts its own.
# The others let NCCL use InfiniBand and RoCE; without them it takes TCP. Debian removes old versions: none is pinned.
apt-get update
apt-get install --yes --no-install-recommends gcc libc6-dev libibverbs1 ibverbs-providers
rm -rf /var/lib/apt/lists/*

groupadd --gid 10001 baton
useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /bin/bash baton
# A login shell (KubeRay before 1.4, or with ENABLE_LOGIN_SHELL) begins with a PATH of its own.
# shellcheck disable=SC2016  # that shell is to expand it
echo 'export PATH=/opt/baton/bin:$PATH' > /etc/profile.d/baton.sh
