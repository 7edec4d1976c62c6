#!/bin/sh
# Creates a virtual environment without pip from the lock, for extras of pyproject.toml.
#   packages.sh VENV EXTRA...
# Bytecode is compiled here, because the root is read-only later, in a form that does not depend on the build time. The
# Kubernetes client's classes per kind would be 60 MB of it; only those of the metadata are used.
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
