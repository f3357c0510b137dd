# Sourced by quickstart.sh and test.sh: makes or reuses .venv with this project and the extras named in $1, pinned where
# there is a requirements file for this Python, and puts it first on PATH. PYTHON chooses the interpreter.
extras=$1
python=${PYTHON:-python3}
"$python" - <<'CHECK' || exit 2
import sys
if sys.version_info < (3, 11):
    print(f"python: got {sys.version.split()[0]}, expected 3.11 or newer (set PYTHON=...)", file=sys.stderr)
    sys.exit(1)
CHECK
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
pins=requirements/$version.txt
stamp=.venv/installed-$(cat pyproject.toml "$pins" 2>/dev/null | cksum | tr ' ' -)-${extras:-base}
if [ ! -e "$stamp" ]; then
    echo "installing into .venv (Python $version), which takes a minute or two ..."
    # An environment of another Python is replaced: its packages would not fit.
    [ -x ".venv/bin/python$version" ] || "$python" -m venv --clear .venv
    constraint=()
    [ -e "$pins" ] && constraint=(-c "$pins")
    .venv/bin/python -m pip install -q --disable-pip-version-check "${constraint[@]}" -e ".${extras:+[$extras]}"
    touch "$stamp"
fi
export PATH="$PWD/.venv/bin:$PATH"
