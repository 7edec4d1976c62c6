"""Copy what an image needs of its base into a folder, which becomes the image's first layer.

    python3 docker/base_files.py FOLDER PACKAGES

That is Python with its standard library, a shell with a few commands, the certificate authorities, and the shared
libraries of these and of the extension modules below ``PACKAGES``. The list of Debian packages names those that own a
copied file, so that scanners find them. The rest of a base, a package manager and Perl among it, would be two thirds of
an image, with vulnerabilities of its own.

Bytecode of the standard library is compiled here in a form that does not depend on times: a layer has one time for all
files, and a read-only root would compile the library again at every start.
"""

import compileall
import os
import py_compile
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

COMMANDS = (
    *("base64", "cat", "cp", "env", "head", "id", "ls", "mkdir", "mv", "rm", "sh", "sleep", "stat", "tail", "tr"),
    "openssl",  # makes the certificate of a picker's port
)
FILES = (
    *("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/os-release", "/usr/lib/os-release"),
    *("/etc/debian_version", "/etc/ssl/certs/ca-certificates.crt", "/etc/ssl/openssl.cnf"),
)
LINKS = ("/bin", "/sbin", "/lib", "/lib64", "/usr/lib/ssl/certs", "/usr/lib/ssl/openssl.cnf", "/usr/lib/ssl/private")
FOLDERS = {
    "/tmp": 0o1777,
    "/var/tmp": 0o1777,
    "/run": 0o755,
    "/proc": 0o555,
    "/sys": 0o555,
    "/dev": 0o755,
    "/root": 0o700,
}
UNUSED = (
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "pydoc_data",
    "config-3*",
    "_tkinter*",
)
"""Parts of the standard library that no process of an image imports."""
PACKAGES = Path("/var/lib/dpkg/status")
WITHOUT_FILES = ("base-files", "ca-certificates", "tzdata")
"""Packages whose files here were made by their scripts, or which say what release this is."""


def copy(path: Path, root: Path) -> Path:
    """Copy a file to its place, or a link and the file that it leads to. Returns the file's own path."""
    to = root / path.relative_to("/")
    to.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        if not to.is_symlink():
            to.symlink_to(path.readlink())
        return copy((path.parent / path.readlink()).resolve(), root)
    if not to.exists():
        shutil.copy2(path, to)
    return path


def copy_python(root: Path) -> list[Path]:
    """Copy the interpreter and its standard library; return the files that load shared libraries."""
    interpreter = Path(sys._base_executable)  # type: ignore[attr-defined]
    names = ("python3", f"python3.{sys.version_info.minor}")
    programs = {copy(interpreter.with_name(name), root) for name in names}
    library = Path(sysconfig.get_path("stdlib"))
    to = root / library.relative_to("/")
    unused = shutil.ignore_patterns(*UNUSED, "__pycache__", "site-packages", "dist-packages")
    shutil.copytree(library, to, symlinks=True, ignore=unused, dirs_exist_ok=True)
    form = py_compile.PycInvalidationMode.UNCHECKED_HASH
    if not compileall.compile_dir(to, quiet=1, stripdir=str(root), prependdir="/", invalidation_mode=form):
        raise SystemExit("the standard library does not compile")
    return [*programs, *(library / module.relative_to(to) for module in to.glob("lib-dynload/*.so"))]


def shared_libraries(files: Iterable[Path]) -> Iterator[Path]:
    """Yield the shared libraries that programs and modules load, and the dynamic loader."""
    done = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        words = line.split()
        path = next((word for word in words if word.startswith("/") and not word.endswith(":")), "")
        if path and "(" in line:
            yield Path(path)


def owners(files: Iterable[Path]) -> set[str]:
    """Return the Debian packages of files. A file may be registered by its path before ``/lib`` became a link."""
    names = {str(path) for path in files}
    names |= {name.removeprefix("/usr") for name in names} | {f"/usr{name}" for name in names}
    done = subprocess.run(["dpkg-query", "--search", *sorted(names)], capture_output=True, text=True, check=False)
    found = (line.partition(": ")[0] for line in done.stdout.splitlines() if not line.startswith("diversion by"))
    return {name.partition(":")[0].strip() for line in found for name in line.split(",")}


def write_packages(packages: set[str], root: Path) -> None:
    """Write the list of packages, and their licences."""
    stanzas = [
        stanza
        for stanza in PACKAGES.read_text().split("\n\n")
        if stanza.partition("\n")[0].removeprefix("Package: ") in packages
    ]
    to = root / PACKAGES.relative_to("/")
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text("\n\n".join(stanza.strip("\n") for stanza in stanzas) + "\n")
    for package in packages:
        if (licence := Path("/usr/share/doc", package, "copyright")).is_file():
            copy(licence.resolve(), root)


def main() -> None:
    os.umask(0o022)
    root, packages = Path(sys.argv[1]), Path(sys.argv[2])
    for name in LINKS:
        if (path := Path(name)).is_symlink():
            link, target = root / name[1:], path.readlink()
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
            if not target.is_absolute():
                (link.parent / target).mkdir(parents=True, exist_ok=True)
    programs = [copy(Path(shutil.which(name) or name), root) for name in COMMANDS]
    programs += copy_python(root)
    libraries = {
        copy(path, root)
        for path in shared_libraries([*programs, *packages.rglob("*.so")])
        if not path.is_relative_to(packages)
    }
    files = {copy(Path(name), root) for name in FILES if Path(name).exists()}
    for name, mode in FOLDERS.items():
        (root / name[1:]).mkdir(parents=True, exist_ok=True)
        (root / name[1:]).chmod(mode)
    subprocess.run(["ldconfig", "-r", str(root)], check=True)
    if PACKAGES.is_file():
        write_packages(owners([*programs, *libraries, *files]) | set(WITHOUT_FILES), root)


if __name__ == "__main__":
    main()
