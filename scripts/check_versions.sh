#!/usr/bin/env bash
# A quick subset of the tests at both ends of what pyproject.toml allows: the lowest declared versions
# on Python 3.11, and the newest of everything on a newer Python, without constraints.txt.
#   scripts/check_versions.sh [lowest|newest|all] [newer python]
set -euo pipefail
cd "$(dirname "$0")/.."
which=${1:-all}
newer=${2:-python3.13}
folder=${VERSIONS_FOLDER:-build/versions}

# What the subset needs besides the package itself.
TOOLS=(pytest pytest-xdist hypothesis beartype matplotlib optax arviz)
TESTS=(tests/test_operators.py tests/test_tridiagonal.py tests/test_bad_input.py tests/test_storage.py
  tests/test_ciq_quadrature.py tests/test_preconditioner_diagonals.py tests/test_laplace_likelihoods.py
  tests/test_krylov.py tests/test_beliefs.py tests/test_interop_arviz.py)

# "name==version" for every "name>=version" of the dependencies.
lowest_pins() {
  "$1" - <<'PY'
import re, tomllib

for line in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]:
    requirement, _, marker = (part.strip() for part in line.partition(";"))
    if not marker:
        print(re.sub(r">=", "==", requirement))
PY
}

check() { # name, python, then what to install
  local name=$1 python=$2
  shift 2
  echo "==> $name: $("$python" --version)"
  test -x "$folder/$name/bin/python" || "$python" -m venv "$folder/$name"
  "$folder/$name/bin/python" -m pip install --quiet --disable-pip-version-check -e . "${TOOLS[@]}" "$@"
  "$folder/$name/bin/pip" freeze | grep -iE '^(jax|jaxlib|equinox|lineax|jaxtyping|numpy|scipy)=='
  "$folder/$name/bin/python" -m pnkrylov
  "$folder/$name/bin/python" -m pytest -q -n 0 "${TESTS[@]}"
}

if [[ $which != newest ]]; then
  mapfile -t pins < <(lowest_pins python3.11)
  check lowest python3.11 "${pins[@]}"
fi
if [[ $which != lowest ]]; then
  if "$newer" --version >/dev/null 2>&1; then
    check newest "$newer" --upgrade --upgrade-strategy eager
  else
    echo "==> newest: skipped, there is no $newer here"
  fi
fi
