#!/bin/bash
# venv.sh: makes .venv, or does nothing (in a tenth of a second) when it is up to date.
#
# torch and its CUDA libraries are 6 GB, too much for every clone. So the dependencies live in one virtual environment for each set of
# pinned versions, shared by all clones and by CI, in ${XDG_CACHE_HOME:-~/.cache}/outboard/venv-HASH. `.venv` is a small one on top: it
# sees those packages through a .pth file and holds this checkout itself, editable.
set -euo pipefail
cd "$(dirname "$0")/.."

extras="server torch load otel plot video test"
python=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}
[ -n "$python" ] || { echo "make: no python3 found; install Python 3.11 or newer, or set PYTHON=/path/to/python" >&2; exit 2; }

# Line one: what identifies Python, its platform and the dependencies; line two: the requirements to install.
{ read -r hash; read -r -a requirements; } < <("$python" - $extras <<'PY'
import hashlib
import platform
import sys

if sys.version_info < (3, 11):
    sys.exit(f"make: {sys.executable} is Python {platform.python_version()}; 3.11 or newer is needed (set PYTHON=/path/to/python)")
import tomllib

with open("pyproject.toml", "rb") as file:
    config = tomllib.load(file)
project = config["project"]
wanted = sorted({r.replace(" ", "") for r in [*config["build-system"]["requires"], *project["dependencies"],
                                              *(r for extra in sys.argv[1:] for r in project["optional-dependencies"][extra])]})
with open("constraints.txt") as file:
    pins = sorted(line.strip() for line in file if not line.startswith("#"))
print(hashlib.sha256(f"{sys.version_info[:3]}{platform.machine()}{wanted}{pins}".encode()).hexdigest()[:12])
print(*wanted)
PY
) || exit 2  # Python has said why

cache=${XDG_CACHE_HOME:-$HOME/.cache}/outboard
deps=$cache/venv-$hash
stamp="$hash $PWD $(cksum <pyproject.toml)"
if [ -e "$deps/complete" ] && [ -x .venv/bin/outboard ] && [ "$(cat .venv/complete 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9 # two clones at once: the second waits for the first one's packages
if [ ! -e "$deps/complete" ]; then
    echo "Installing the dependencies into $deps."
    echo "This happens once for each set of versions. torch with its CUDA libraries is 6 GB on disk (2.5 GB to download)."
    rm -rf "$deps" # left by an install that was cut off: without its mark it is never used
    "$python" -m venv "$deps"
    "$deps/bin/python" -m pip install --disable-pip-version-check --quiet --constraint constraints.txt "${requirements[@]}"
    touch "$deps/complete"
fi
exec 9>&-

echo "Making .venv"
rm -rf .venv
"$python" -m venv --without-pip .venv
packages=$("$deps/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$packages')" >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dependencies.pth"
.venv/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
# The commands of the dependencies (pytest, ruff, locust ...), run by .venv's Python so that they see this checkout too.
for command in "$deps"/bin/*; do
    name=$(basename "$command")
    [ -e ".venv/bin/$name" ] && continue
    case $name in python* | pip* | activate* | Activate*) continue ;; esac
    if head -c 2 "$command" | grep -q '#!'; then
        { echo "#!$PWD/.venv/bin/python"; tail -n +2 "$command"; } >".venv/bin/$name"
        chmod +x ".venv/bin/$name"
    else
        ln -s "$command" ".venv/bin/$name"
    fi
done
echo "$stamp" >.venv/complete
