#!/bin/sh
# Creates a virtual environment without pip from the lock, for extras of pyproject.toml.
#   packages.sh VENV EXTRA...
# Bytecode is compiled here, because the root is read-only later, in a form that does not depend on the build time. The
# Kubernetes client has 54 MB of calls per API, none of which is used, and classes per kind twice: importing it loads three
# of the blocking client's, and validation loads few of the other's.
set -eu
umask 022
venv=$1
shift
cd /build
python3 docker/requirements.py "$@" >requirements.txt
python3 -m venv --without-pip "$venv"
tools/bin/pip --python "$venv/bin/python3" install --quiet --no-compile --only-binary :all: \
  --require-hashes -r requirements.txt
loaded='__init__|v1_(object_meta|managed_fields_entry|owner_reference)'
find "$venv"/lib/python3*/site-packages -path '*/kubernetes/*client/api/*' ! -name __init__.py -delete
find "$venv"/lib/python3*/site-packages -regextype posix-extended -path '*/kubernetes/client/models/*' \
  ! -regex ".*/($loaded)\.py" -delete
python3 docker/strip.py "$venv"
"$venv/bin/python3" -m compileall -q -x "/kubernetes/.*client/models/(?!($loaded)\.)" --invalidation-mode unchecked-hash \
  "$venv/lib"
