#!/bin/sh
# Installs the build of torch that TORCH_BUILD names, at the version that constraints.txt pins.
set -eu

version=$(sed -n 's/^torch==//p' constraints.txt)
install() {
    pip install -q ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} "torch==$1"
}

case "$TORCH_BUILD" in
cuda) install "$version" ;;
cpu)
    install "$version+cpu" || {
        echo "No index has torch $version+cpu: installing the default build, which is larger." \
            "TORCH_INDEX_URL adds an index." >&2
        install "$version"
    }
    ;;
*) install "$version+$TORCH_BUILD" ;;
esac
