#!/bin/sh
# Installs the project's wheel into a virtual environment and copies its files to /build/own for a separate layer.
#   project.sh VENV
# The compiled form (docs/native.md) is installed too if it was built and fits this base; it is optional.
set -eu
umask 022
venv=$1
cd /build
touch began
tools/bin/pip --python "$venv/bin/python3" install --quiet --no-compile --no-deps --no-index dist/*.whl
for wheel in native/*.whl; do
  if [ -e "$wheel" ]; then
    tools/bin/pip --python "$venv/bin/python3" install --quiet --no-compile --no-deps --no-index "$wheel" ||
      echo "the compiled form is not for this base: the image runs the form in Python" >&2
  fi
done
for package in "$venv"/lib/python*/site-packages/mmrouter*/; do
  "$venv/bin/python3" -m compileall -q --invalidation-mode unchecked-hash "$package"
done
case $venv in */sim) "$venv/bin/python3" -m mmrouter_sim install "$venv/bin" ;; esac
mkdir own
cd /
find "${venv#/}" -newer /build/began ! -type d -print0 | sort -z | tar --create --null --files-from=- |
  tar --extract --directory=/build/own
