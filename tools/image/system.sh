#!/bin/bash
# Install the Debian packages of the image and create its user. Runs as root in the image.
set -euo pipefail

# gcc and libc6-dev: CPU kernels are compiled at their first use, and triton compiles its launchers. The others are for
# NCCL over InfiniBand and RoCE; without them NCCL uses TCP. No version is pinned, because Debian removes old versions.
apt-get update
apt-get install --yes --no-install-recommends gcc libc6-dev libibverbs1 ibverbs-providers
rm -rf /var/lib/apt/lists/*

groupadd --gid 10001 baton
useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /bin/bash baton
# A login shell (KubeRay before 1.4, or with ENABLE_LOGIN_SHELL) resets PATH.
# shellcheck disable=SC2016  # the login shell expands it
echo 'export PATH=/opt/baton/bin:$PATH' > /etc/profile.d/baton.sh
