#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs a release of Baton from a tarball, after verifying its checksum.
#
#   sh install.sh baton-0.1.0-x86_64-linux.tar.gz              a file, with its .sha256 beside it
#   BATON_RELEASES=https://host/path sh install.sh 0.1.0       a release below that address
#
# PREFIX says where to (default: ~/.local; /usr/local for root).
set -eu

fail() {
    echo "error: $*" >&2
    exit 1
}

sum() {
    if command -v sha256sum >/dev/null; then
        sha256sum "$1"
    else
        shasum -a 256 "$1"
    fi
}

[ $# -eq 1 ] || fail "usage: sh install.sh TARBALL|VERSION"
if [ "$(id -u)" = 0 ]; then prefix=${PREFIX:-/usr/local}; else prefix=${PREFIX:-$HOME/.local}; fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ -f "$1" ]; then
    tarball=$1
    [ -f "$tarball.sha256" ] || fail "$tarball.sha256 is not there: the tarball cannot be verified"
else
    : "${BATON_RELEASES:?set BATON_RELEASES to the address of the releases, or give a tarball}"
    machine=$(uname -m)
    case "$(uname -s)-$machine" in
        Linux-x86_64 | Linux-aarch64) ;;
        *) fail "there is no release for $(uname -s) on $machine: build it with cargo build --release" ;;
    esac
    name=baton-$1-$machine-linux.tar.gz
    tarball=$work/$name
    for file in "$name" "$name.sha256"; do
        curl --fail --silent --show-error --location --output "$work/$file" "$BATON_RELEASES/$file" ||
            fail "cannot fetch $BATON_RELEASES/$file"
    done
fi

expected=$(cut -d ' ' -f 1 "$tarball.sha256")
actual=$(sum "$tarball" | cut -d ' ' -f 1)
[ "$expected" = "$actual" ] || fail "$tarball has the checksum $actual, expected $expected"

mkdir -p "$prefix"
tar --extract --gzip --file "$tarball" --directory "$work"
unpacked=$(find "$work" -mindepth 1 -maxdepth 1 -type d -name 'baton-*' | head -n 1)
[ -x "$unpacked/bin/baton" ] || fail "$tarball holds no bin/baton"
for part in bin share lib; do
    [ ! -d "$unpacked/$part" ] || cp -R "$unpacked/$part" "$prefix/"
done
"$prefix/bin/baton" --version
case ":$PATH:" in
    *":$prefix/bin:"*) ;;
    *) echo "note: $prefix/bin is not in your PATH" ;;
esac
