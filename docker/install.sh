#!/bin/sh
# Installs into a virtual environment that has no pip.
#   install.sh VENV EXTRA...      what the lock has for extras of pyproject.toml
#   install.sh VENV WHEEL.whl     the project itself; its files are also put below /build/own, for a layer of their own
# Bytecode is made here, as the root is read-only later, and in a form that does not depend on the time of the build.
set -eu
venv=$1
shift
cd /build
[ -d "$venv" ] || python3 -m venv --without-pip "$venv"
site=$("$venv/bin/python3" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
install() { tools/bin/pip --python "$venv/bin/python3" install --quiet --no-compile --only-binary :all: "$@"; }
# The Kubernetes client's classes per kind are loaded by nobody here, and their bytecode is 60 MB.
compile() {
  "$venv/bin/python3" -m compileall -q -x '/kubernetes/.*client/(api|models)/' --invalidation-mode unchecked-hash "$@"
}
case $1 in
  *.whl)
    touch began
    install --no-deps --no-index "$@"
    compile "$site"/mmrouter*
    case $venv in */sim) "$venv/bin/python3" -m mmrouter_sim install "$venv/bin" ;; esac
    mkdir own
    find "$venv" -newer began -type f -exec cp --parents -p {} own \;
    ;;
  *)
    python3 docker/requirements.py "$@" >requirements.txt
    install --require-hashes -r requirements.txt
    compile "$site"
    ;;
esac
