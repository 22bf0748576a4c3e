#!/bin/sh
# Removes pip, the wheels that would install it again, and setuptools from the base image: an image that serves installs
# nothing. Debian's packages of them exist in bases that are not Docker's official one.
set -eu

for package in python3-venv python3.11-venv python3-pip python3-setuptools python3-wheel python3-pip-whl \
    python3-setuptools-whl; do
    if dpkg-query -W "$package" >/dev/null 2>&1; then
        dpkg --purge --force-depends "$package" >/dev/null
    fi
done
for library in /usr/lib/python3* /usr/local/lib/python3*; do
    [ -d "$library" ] || continue
    rm -rf "$library"/ensurepip
    for packages in "$library"/site-packages "$library"/dist-packages; do
        rm -rf "$packages"/pip "$packages"/pip-*.dist-info "$packages"/setuptools "$packages"/setuptools-*.dist-info \
            "$packages"/pkg_resources "$packages"/wheel "$packages"/wheel-*.dist-info
    done
done
rm -rf /usr/share/python-wheels
rm -f /usr/bin/pip* /usr/local/bin/pip* /usr/local/bin/wheel
