#!/usr/bin/env bash
# Build the sdist and from it the wheel, install the wheel away from the source tree and use it.
# The new environment borrows the dependencies of .venv, so only pnkrylov itself is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=$root/.venv/bin/python

rm -rf build/dist
"$python" -m build --no-isolation --outdir build/dist .
"$python" - build/dist <<'PY'
import pathlib, sys, tarfile, zipfile

dist = pathlib.Path(sys.argv[1])
wheel = zipfile.ZipFile(next(dist.glob("*.whl"))).namelist()
with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
    sdist = ["/".join(name.split("/")[1:]) for name in archive.getnames()]
assert "pnkrylov/py.typed" in wheel, "the wheel lacks pnkrylov/py.typed"
stray = [n for n in wheel if not n.startswith("pnkrylov/") and ".dist-info/" not in n]
assert not stray, f"the wheel has files outside the package: {stray}"
for needed in ("pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "tests/conftest.py"):
    assert needed in sdist, f"the sdist lacks {needed}"
stray = [n for n in sdist if n.startswith(("build/", ".venv/")) or "__pycache__" in n]
assert not stray, f"the sdist has build products: {stray}"
print(f"wheel: {len(wheel)} files, sdist: {len(sdist)} files")
PY

away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT
"$python" -m venv "$away/venv"
"$away/venv/bin/pip" install --quiet --no-deps build/dist/*.whl
# A .pth line adds a folder, but does not read the .pth files in it: .venv's editable pnkrylov stays out.
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    > "$("$away/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
cd "$away"
venv/bin/python - <<PY
import importlib.resources, pathlib
import pnkrylov

where = pathlib.Path(pnkrylov.__file__).resolve()
assert where.is_relative_to(pathlib.Path("$away").resolve()), f"imported from {where}"
assert importlib.resources.files("pnkrylov").joinpath("py.typed").is_file()
print(f"installed wheel imports: pnkrylov {pnkrylov.__version__} from {where.parent}")
PY
venv/bin/python -m pnkrylov
