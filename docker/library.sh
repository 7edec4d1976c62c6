#!/bin/sh
# Compiles bytecode of Python's standard library into a folder, for a layer, if the base image has none: Docker's Python
# images have none, and with a read-only root every start would compile the library again.
#   library.sh FOLDER
set -eu
umask 022
folder=$1
mkdir -p "$folder"
cd /
kept=$(python3 -c 'import importlib.util, os; print(importlib.util.cache_from_source(os.__file__))')
if [ -e "$kept" ]; then exit 0; fi
touch "$folder.began"
library=$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
python3 -m compileall -q -x '/(test|tests|idlelib|lib2to3|tkinter|turtledemo|ensurepip|site-packages)/' \
  --invalidation-mode unchecked-hash "$library"
find "${library#/}" -newer "$folder.began" -name '*.pyc' -print0 | sort -z | tar --create --null --files-from=- |
  tar --extract --directory="$folder"
