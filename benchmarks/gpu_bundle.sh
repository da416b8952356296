#!/bin/bash
# gpu_bundle.sh [NSMC]: make the folder build/gpu, to be carried to a machine with a GPU and no network, whose
# Python has PyTorch, transformers and Lightning. It has hpctrain, the benchmark, what it compares with, and
# the reviews of NSMC, if their folder is given. There: build/gpu/run.sh --budget 780

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=containers/build_functions.sh
source containers/build_functions.sh

packages=(liger-kernel==0.8.5 peft==0.21.2) # pure Python: good for every version of it
most=60                                     # MB

case "$#:${1:-}" in
    0:) data=() ;;
    1:-h | 1:--help) usage && exit ;;
    1:-*) die "unknown argument $1 (see --help)" ;;
    1:*) data=(--data nsmc) ;;
    *) die "too many arguments (see --help)" ;;
esac
mkdir -p build
unfinished=$(mktemp -d -p build .gpu.XXXXXX) || die "cannot write to build/; free some space there"
trap 'rm -rf "$unfinished"' EXIT
chmod 755 "$unfinished"
if ((${#data[@]})); then
    mkdir "$unfinished/nsmc"
    for name in ratings_train.txt ratings_test.txt; do
        [[ -f $1/$name ]] || die "$1/$name is missing: give the folder of NSMC"
        cp "$1/$name" "$unfinished/nsmc/"
    done
fi
python3 -m pip install --quiet --no-deps --no-compile --disable-pip-version-check --root-user-action ignore \
    --target "$unfinished/packages" "${packages[@]}"
cp -r src/hpctrain "$unfinished/packages/"
cp -r benchmarks "$unfinished/"
git describe --always --dirty >"$unfinished/benchmarks/revision"
find "$unfinished" -name __pycache__ -prune -exec rm -r {} +
cat >"$unfinished/run.sh" <<EOF
#!/bin/bash
cd "\$(dirname "\${BASH_SOURCE[0]}")"
PYTHONPATH=\$PWD/packages\${PYTHONPATH:+:\$PYTHONPATH} exec python3 benchmarks/gpu.py ${data[*]} "\$@"
EOF
chmod 755 "$unfinished/run.sh"
size=$(du -sm --apparent-size "$unfinished" | cut -f1)
((size <= most)) || die "the folder has $size MB, more than $most"
rm -rf build/gpu
mv "$unfinished" build/gpu
echo "build/gpu ($size MB): carry it to the machine with the GPU, and run run.sh in it"
