#!/usr/bin/env bash
# Prepares this machine for the other make targets, and does nothing where nothing has changed.
#
#   setup.sh         what is missing from apt, then .venv with lanterne[dev]
#   setup.sh torch   .venv-torch with PyTorch (the jobs of make test-torch and make demo-torch)
#   setup.sh helm    .venv-helm with Helm's engine and Kubernetes' schemas (make test-helm)
#   setup.sh deb     what boots a Debian in a container (make test-deb)
#   setup.sh vm      qemu and what builds its images (make test-kernel-vm)
#   setup.sh nccl    build/nccl/VERSION/libnccl.so.2 of the oldest tested and the newest wheel,
#                    and the wheels of expert-parallel libraries in build/wheels; with NCCL_ALL=1
#                    more of both, and RCCL in build/rccl
#
# Debian 12 and 13, Ubuntu 22.04 and 24.04. Elsewhere, and without root, it says what to install.
set -euo pipefail

cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$(pwd -P)
TORCH_REQUIREMENTS=("torch==2.13.0" "numpy")
HELM_REQUIREMENTS=("helm-python-sdk>=0.2.2,<0.3" "kubernetes-validate>=1.37" "pytest>=8.2" "pytest-timeout>=2.3")
NCCL_PACKAGE=nvidia-nccl-cu12
NCCL_OLDEST=2.21.5
# With NCCL_ALL=1: every release whose layout is known (4 GB of downloads).
NCCL_KNOWN=(2.18.3 2.23.4 2.26.5 2.27.7 2.28.9 2.29.7 2.30.7 2.31.2 2.32.3)
export DEBIAN_FRONTEND=noninteractive PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
# pip shows its bars to a person; a log gets errors only.
if [ -t 2 ]; then PIP_VERBOSITY=(); else PIP_VERBOSITY=(-qq); fi

# One setup at a time: `make -j` and two terminals share the folders below.
lock() {
  mkdir -p build
  exec 9>build/.setup.lock
  flock -n 9 || { say "waiting for another setup to finish"; flock 9; }
}

# A stamp holds what the folder was made from; the path is in it because a moved venv is broken.
stamp_of() { { printf '%s\n' "$ROOT" "$@"; cat; } | sha256sum | cut -d' ' -f1; }
is_fresh() { [ -x "$1/bin/python" ] && [ "$(cat "$1/.lanterne-stamp" 2>/dev/null)" = "$2" ]; }

find_python() {
  local candidate
  for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

includes() { printf '#include <%s>\n' "$1" | gcc -E -x c - ; }

# Fills MISSING with the Debian packages of what does not work here.
look_for_packages() {
  MISSING=()
  need() { local package=$1; shift; "$@" >/dev/null 2>&1 9>&- || MISSING+=("$package"); }
  need gcc command -v gcc
  need libc6-dev includes stdio.h
  need systemtap-sdt-dev includes sys/sdt.h
  need make command -v make
  need binutils command -v readelf
  need iproute2 command -v ip
  need util-linux command -v unshare
  need runc env PATH="$PATH:/usr/sbin:/sbin" sh -c 'command -v runc'
  need prometheus command -v promtool
  need systemd command -v systemd-analyze
  need openssl command -v openssl
  need strace command -v strace
  need python3-bpfcc /usr/bin/python3 -c 'import bcc'
  local python
  if python=$(find_python); then
    need "$(venv_package "$python")" "$python" -c 'import ensurepip, venv'
  else
    MISSING+=(python3 python3-venv)
  fi
}

# Debian splits ensurepip off, by minor version for other interpreters than its own python3.
venv_package() {
  case $1 in
    /usr/bin/python3 | /bin/python3) echo python3-venv ;;
    *) "$1" -c 'import sys; print("python3.%d-venv" % sys.version_info[1])' ;;
  esac
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo env DEBIAN_FRONTEND=noninteractive "$@"; fi
}

can_be_root() {
  [ "$(id -u)" = 0 ] && return
  command -v sudo >/dev/null || return 1
  sudo -n true 2>/dev/null || { [ -t 0 ] && [ -t 2 ]; }
}

# Descriptor 9 is closed: a service that a package starts would hold the lock for ever.
apt_install() {
  as_root apt-get install -y -q --no-install-recommends -o DPkg::Lock::Timeout=120 "$@" \
    9>&- </dev/null >build/apt.log 2>&1
}

install_packages() {
  local policy=/usr/sbin/policy-rc.d newer
  say "installing with apt: ${MISSING[*]} (log: build/apt.log)"
  # Debian starts a service with its package; nobody asked for a running Prometheus.
  if [ ! -e $policy ]; then
    trap 'as_root rm -f /usr/sbin/policy-rc.d' EXIT
    printf '#!/bin/sh\nexit 101\n' | as_root tee $policy >/dev/null
    as_root chmod 755 $policy
  fi
  if ! apt_install "${MISSING[@]}"; then
    say "refreshing the package lists"
    as_root apt-get update -q 9>&- </dev/null >build/apt-update.log 2>&1 ||
      say "apt-get update failed: see build/apt-update.log"
    apt_install "${MISSING[@]}" || { tail -n 15 build/apt.log >&2; return 1; }
  fi
  # Ubuntu 22.04 has Python 3.10 as python3, and a newer one beside it.
  if ! find_python >/dev/null; then
    for newer in python3.13 python3.12 python3.11; do
      if apt_install "$newer" "$newer-venv"; then break; fi
    done
  fi
  if [[ " ${MISSING[*]} " == *" prometheus "* ]] && command -v systemctl >/dev/null; then
    as_root systemctl disable prometheus.service >/dev/null 2>&1 || true
  fi
}

# Returns 1 where something stays missing: the venv is still made, and the next call looks again.
setup_system() {
  local look=${1:-look_for_packages}
  $look
  [ ${#MISSING[@]} -eq 0 ] && return
  if ! command -v apt-get >/dev/null; then
    say "missing, by Debian's package names: ${MISSING[*]}"
    say "install them with this system's package manager; kernel tests and the demo need them"
    return 1
  elif ! can_be_root; then
    say "missing, and neither root nor sudo is at hand; run: apt-get install ${MISSING[*]}"
    return 1
  fi
  install_packages && $look && [ ${#MISSING[@]} -eq 0 ] && return
  say "still missing after apt: ${MISSING[*]}"
  return 1
}

# make_venv FOLDER STAMP PIP-ARGUMENT...
make_venv() {
  local folder=$1 stamp=$2 python
  shift 2
  if [ ! -x "$folder/bin/python" ] || ! "$folder/bin/python" -m pip --version >/dev/null 2>&1 ||
    ! grep -qsF "$ROOT/$folder/" "$folder/bin/pip"; then
    python=$(find_python) ||
      die "Python 3.11 or newer is needed, and not on the PATH: install one and run make setup again"
    say "making $folder with $("$python" --version)"
    rm -rf "$folder"
    "$python" -m venv "$folder"
  fi
  say "installing into $folder: $*"
  "$folder/bin/python" -m pip install "${PIP_VERBOSITY[@]}" "$@" >&2 ||
    die "pip could not install $*: see its message above; is a package index reachable?"
  printf '%s\n' "$stamp" >"$folder/.lanterne-stamp"
}

setup_base() {
  local stamp complete=yes
  stamp=$(cat pyproject.toml tests/setup.sh | stamp_of base)
  is_fresh .venv "$stamp" && return
  lock
  is_fresh .venv "$stamp" && return
  setup_system || { complete=no; stamp=incomplete; }
  local python_stamp
  python_stamp=$(stamp_of python <pyproject.toml)
  if [ "$(cat .venv/.lanterne-python 2>/dev/null)" != "$python_stamp" ] || [ ! -x .venv/bin/python ]; then
    make_venv .venv "$stamp" -e '.[dev]'
    printf '%s\n' "$python_stamp" >.venv/.lanterne-python
  else
    printf '%s\n' "$stamp" >.venv/.lanterne-stamp
  fi
  if [ $complete = yes ]; then say "ready"; else say "ready in part: see above"; fi
}

setup_torch() {
  local stamp
  stamp=$(stamp_of "${TORCH_REQUIREMENTS[@]}" </dev/null)
  is_fresh .venv-torch "$stamp" && return
  lock
  is_fresh .venv-torch "$stamp" && return
  make_venv .venv-torch "$stamp" "${TORCH_REQUIREMENTS[@]}"
  say "PyTorch is ready"
}

# Apart from .venv: Helm's engine and the schemas unpack to 350 MB.
setup_helm() {
  local stamp
  stamp=$(stamp_of "${HELM_REQUIREMENTS[@]}" </dev/null)
  is_fresh .venv-helm "$stamp" && return
  lock
  is_fresh .venv-helm "$stamp" && return
  make_venv .venv-helm "$stamp" "${HELM_REQUIREMENTS[@]}"
  say "Helm's engine is ready"
}

# The newest version that the index has, asked at most once a day; else the newest kept one.
newest_nccl() {
  local known=build/nccl/newest
  if [ -z "$(find $known -mmin -1440 2>/dev/null)" ]; then
    .venv/bin/python -m pip index versions $NCCL_PACKAGE 2>/dev/null |
      sed -n "s/^$NCCL_PACKAGE (\(.*\))$/\1/p" >$known.new || true
    if [ -s $known.new ]; then mv $known.new $known; else rm -f $known.new; fi
  fi
  cat $known 2>/dev/null || die "the index does not tell the versions of $NCCL_PACKAGE"
}

fetch_nccl() {
  local version=$1 folder=build/nccl/$1 tmp
  [ -s "$folder/libnccl.so.2" ] && return
  say "downloading $NCCL_PACKAGE $version (some 300 MB)"
  tmp=$(mktemp -d build/nccl/.download.XXXXXX)
  .venv/bin/python -m pip download "${PIP_VERBOSITY[@]}" --no-deps --only-binary :all: -d "$tmp" \
    "$NCCL_PACKAGE==$version" >&2 || { rm -rf "$tmp"; die "pip could not download $NCCL_PACKAGE==$version"; }
  .venv/bin/python -m zipfile -e "$tmp"/*.whl "$tmp/wheel"
  mkdir -p "$folder"
  mv "$tmp/wheel/nvidia/nccl/lib/libnccl.so.2" "$folder/libnccl.so.2"
  rm -rf "$tmp"
}

# fetch_wheel PROJECT VERSION MB: unpacked into build/wheels/PROJECT (dashes as underscores).
fetch_wheel() {
  local folder=build/wheels/${1//-/_} tmp
  [ "$(cat "$folder/.version" 2>/dev/null)" = "$2" ] && return
  say "downloading $1 $2 ($3 MB)"
  mkdir -p build/wheels
  tmp=$(mktemp -d build/wheels/.download.XXXXXX)
  # Read, never run: any interpreter's wheel does.
  .venv/bin/python -m pip download "${PIP_VERBOSITY[@]}" --no-deps --only-binary :all: \
    --python-version 3.11 --platform manylinux_2_28_x86_64 -d "$tmp" "$1==$2" >&2 ||
    { rm -rf "$tmp"; die "pip could not download $1==$2"; }
  .venv/bin/python -m zipfile -e "$tmp"/*.whl "$tmp/wheel"
  printf '%s\n' "$2" >"$tmp/wheel/.version"
  rm -rf "$folder"
  mv "$tmp/wheel" "$folder"
  rm -rf "$tmp"
}

# Debian's RCCL and the C library that it was linked against, of trixie whatever this system is:
# read and called in a process of its own, never installed. An amd64 system with apt only.
RCCL_VERSION=5.4.3-3+b1
fetch_rccl() {
  local folder=build/rccl tmp
  [ "$(cat $folder/.version 2>/dev/null)" = "$RCCL_VERSION" ] && return
  if ! command -v apt-get >/dev/null || [ "$(uname -m)" != x86_64 ]; then
    say "RCCL is left out: it comes as a package of Debian for amd64"
    return
  fi
  say "downloading librccl1 $RCCL_VERSION (125 MB)"
  tmp=$(cd "$(mktemp -d build/.rccl.XXXXXX)" && pwd)
  chmod 755 "$tmp"
  mkdir -p "$tmp/lists/partial" "$tmp/archives/partial"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]" \
    "http://deb.debian.org/debian trixie main" >"$tmp/sources.list"
  # The status of this system is left out, too: apt looks at nothing but that one list.
  local apt=(apt-get -q -o Dir::Etc::SourceList="$tmp/sources.list" -o Dir::Etc::SourceParts=-
    -o Dir::State="$tmp" -o Dir::State::status=/dev/null -o Dir::Cache="$tmp" -o APT::Sandbox::User=root)
  if ! { "${apt[@]}" update && cd "$tmp" && "${apt[@]}" download "librccl1=$RCCL_VERSION" libc6; } \
    >"$tmp/log" 2>&1 9>&-; then
    cd "$ROOT"
    say "RCCL is left out: $(tail -n 1 "$tmp/log")"
  else
    cd "$ROOT"
    rm -rf $folder
    for package in "$tmp"/*.deb; do dpkg-deb -x "$package" $folder; done
    printf '%s\n' "$RCCL_VERSION" >$folder/.version
  fi
  rm -rf "$tmp"
}

setup_nccl() {
  local newest
  mkdir -p build/nccl
  lock
  newest=$(newest_nccl)
  fetch_wheel sgl-deep-ep 0.1.2.post1 15
  fetch_wheel nccl-extensions 0.1.0 23
  fetch_nccl $NCCL_OLDEST
  fetch_nccl "$newest"
  if [ -n "${NCCL_ALL:-}" ]; then
    local version
    fetch_wheel nixl-cu12 1.5.1 69
    fetch_wheel mooncake-transfer-engine 0.3.13.post1 98
    fetch_rccl
    for version in "${NCCL_KNOWN[@]}"; do fetch_nccl "$version"; done
  fi
}

look_for_vm_packages() {
  MISSING=()
  need() { local package=$1; shift; "$@" >/dev/null 2>&1 9>&- || MISSING+=("$package"); }
  need qemu-system-x86 command -v qemu-system-x86_64
  need qemu-system-arm command -v qemu-system-aarch64
  need mmdebstrap command -v mmdebstrap
  need debian-archive-keyring test -e /usr/share/keyrings/debian-archive-keyring.gpg
  need e2fsprogs command -v mke2fs
  need kmod command -v depmod
  need cpio command -v cpio
}

look_for_deb_packages() {
  MISSING=()
  need() { local package=$1; shift; "$@" >/dev/null 2>&1 9>&- || MISSING+=("$package"); }
  need mmdebstrap command -v mmdebstrap
  need debian-archive-keyring test -e /usr/share/keyrings/debian-archive-keyring.gpg
  need systemd-container command -v systemd-nspawn
  need dpkg-dev command -v dpkg-deb
  need lintian command -v lintian
  need buildah command -v buildah
}

setup_deb() {
  lock
  setup_system look_for_deb_packages || die "the containers need the packages above"
}

# The images themselves are made, and kept in build/vm, by tests/vm.
setup_vm() {
  lock
  setup_system look_for_vm_packages || die "the virtual machines need the packages above"
}

case ${1:-base} in
  base) setup_base ;;
  torch) setup_torch ;;
  nccl) setup_nccl ;;
  helm) setup_helm ;;
  vm) setup_vm ;;
  deb) setup_deb ;;
  *) die "unknown part '$1': base, torch, nccl, helm, deb or vm" ;;
esac
