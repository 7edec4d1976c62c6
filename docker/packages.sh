#!/bin/sh
# Makes a virtual environment without pip that holds what the lock has for extras of pyproject.toml.
#   packages.sh VENV EXTRA...
# Bytecode is made here, as the root is read-only later, and in a form that does not depend on the time of the build. The
# bytecode of the Kubernetes client's classes per kind is 60 MB, and nobody here loads any but those of the metadata.
set -eu
umask 022
venv=$1
shift
cd /build
python3 docker/requirements.py "$@" >requirements.txt
python3 -m venv --without-pip "$venv"
tools/bin/pip --python "$venv/bin/python3" install --quiet --no-compile --only-binary :all: \
  --require-hashes -r requirements.txt
unused='/kubernetes/.*client/(api|models)/(?!__init__|v1_(object_meta|managed_fields_entry|owner_reference)\.)'
"$venv/bin/python3" -m compileall -q -x "$unused" --invalidation-mode unchecked-hash "$venv/lib"
