#!/bin/bash
# setup.sh: the peers' virtual environments in ${XDG_CACHE_HOME:-~/.cache}/outboard/peers, pinned. Run once; 1.5 GB, mostly Triton.
#   python   mosec, FastAPI as people write it, and the bare loop
#   triton   the tritonserver binary out of the nvidia-pytriton wheel
set -euo pipefail
cd "$(dirname "$0")"
root=${XDG_CACHE_HOME:-$HOME/.cache}/outboard/peers
# numpy: nvidia-pytriton wants < 2
mkdir -p "$root"
model_runtime=(onnxruntime==1.31.1 pillow==13.0.0 simplejpeg==1.9.0)

make_venv() { # NAME PYTHON PACKAGE...
    local name=$1 python=$2
    shift 2
    [ "$(cat "$root/$name/complete" 2>/dev/null)" = "$*" ] && return
    echo "Installing $name: $*"
    rm -rf "${root:?}/$name"
    "$python" -m venv "$root/$name"
    "$root/$name/bin/python" -m pip install --disable-pip-version-check --quiet "$@"
    echo "$*" >"$root/$name/complete"
}

make_venv python "${PYTHON:-python3.11}" mosec==0.9.8 fastapi==0.165.0 'uvicorn[standard]==0.54.0' python-multipart==0.0.34 "${model_runtime[@]}"
# Triton's stub embeds an early Python 3.11: with the library of 3.11.7 every model fails ("RLock has no _recursion_count"), with Debian's
# 3.11.2 it works.
make_venv triton "${TRITON_PYTHON:-/usr/bin/python3.11}" nvidia-pytriton==0.7.0 "${model_runtime[@]}"
