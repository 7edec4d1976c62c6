"""Compare the locked dependencies with a database of known vulnerabilities.

    python -m hack.supply_chain.audit                   # fails where a locked version has a known vulnerability
    python -m hack.supply_chain.audit --images FOLDER   # the Debian packages of images too
    python -m hack.supply_chain.audit --optional        # prints what it finds, and always succeeds

Prints the age of both locks first, because it is all that is known if the database is not reachable. The database is
OSV's. pip-audit, in an environment of its own that ``hack/supply_chain/audit.lock`` pins, compares
``requirements.lock`` with it, and ``hack/supply_chain/osv.py`` the crates of ``native/Cargo.lock``. The result depends
on the day, so no test level runs this, but a separate job of continuous integration. Exit status:
``hack/build_once.py``.
"""

import argparse
import shutil
import sys
import time
from functools import partial
from pathlib import Path

from hack.build_once import (
    CANNOT,
    FAILED,
    ROOT,
    STAMP,
    CannotMakeError,
    FailedError,
    cache_dir,
    captured,
    digest,
    interpreter,
    is_stamped,
    last_line,
    locked,
    note,
    pip_install,
    quiet_env,
    run,
    status_of,
)
from hack.supply_chain import osv
from hack.supply_chain.bill_of_materials import IMAGES, base_components, crate_components

LOCK = ROOT / "requirements.lock"
CARGO_LOCK = ROOT / "native" / "Cargo.lock"
DATABASE = "https://api.osv.dev"
OWN_LOCK = Path(__file__).with_name("audit.lock")
DAY = 86_400
FOUND = "known vulnerabilit"
"""Part of pip-audit's last line when it has found a vulnerability; its other failures do not print it."""


def age(lock: Path) -> str:
    """Return a sentence that says how old a lock is."""
    done = captured(["git", "-C", str(ROOT), "log", "-1", "--format=%ct", "--", str(lock)])
    shallow = captured(["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository"]).stdout.strip()
    name, text = lock.relative_to(ROOT), done.stdout.strip()
    if not text or shallow != "false":
        return f"the age of {name} is not known here"
    return f"{name} was changed {(time.time() - int(text)) / DAY:.0f} days ago"


def auditor() -> Path:
    """Return pip-audit, installed if need be. Raises :class:`CannotMakeError`, :class:`FailedError`."""
    folder = cache_dir() / "audit"
    recipe = digest(OWN_LOCK.read_text(), interpreter())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / "audit.lock"):
        if not is_stamped(folder / STAMP, recipe):
            shutil.rmtree(folder, ignore_errors=True)
            run([sys.executable, "-m", "venv", str(folder)], "python -m venv")
            hashes = ("--require-hashes", f"--requirement={OWN_LOCK}")
            pip_install(str(folder / "bin" / "python"), hashes, "pip install of pip-audit")
            (folder / STAMP).write_text(recipe)
    return folder / "bin" / "pip-audit"


def audit(program: Path, database: str = DATABASE) -> None:
    """Compare the lock with the database. Raises :class:`FailedError` where a version is vulnerable, and
    :class:`CannotMakeError` where the database cannot be read.
    """
    options = ("--require-hashes", "--disable-pip", "--vulnerability-service=osv", f"--osv-url={database}/v1/query")
    command = [str(program), *options, "--progress-spinner=off", f"--requirement={LOCK}"]
    done = captured(command, env=quiet_env())
    if done.returncode == 0:
        note(last_line(done.stderr or done.stdout))
        return
    if FOUND in done.stderr:
        note(done.stdout.rstrip())
        raise FailedError(f"requirements.lock: {last_line(done.stderr)}")
    raise CannotMakeError(f"the database of vulnerabilities cannot be read ({last_line(done.stderr)})")


def audit_bills(images: Path | None, database: str) -> None:
    """Compare crates, and the Debian packages of the images in a folder. Raises as :func:`osv.compare`."""
    components = crate_components()
    if images is not None:
        components += [each for name in IMAGES for each in base_components(images / f"{name}.tar", ())]
    osv.compare(database, osv.queries(components))


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Compare the locked dependencies with known vulnerabilities.")
    parser.add_argument("--optional", action="store_true", help="print what is found and exit with status 0")
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="archives of the built images")
    parser.add_argument("--database", default=DATABASE, metavar="URL", help="one that speaks OSV's API")
    chosen = parser.parse_args()
    for lock in (LOCK, CARGO_LOCK):
        note(age(lock))
    statuses = [
        status_of(lambda: audit(auditor(), chosen.database)),
        status_of(partial(audit_bills, chosen.images, chosen.database)),
    ]
    if CANNOT in statuses:
        note("audit: not run: see the reason above")
    if chosen.images is None:
        note("Debian packages of images: not run: --images names no archives")
    return 0 if chosen.optional else FAILED if FAILED in statuses else max(statuses)


if __name__ == "__main__":
    sys.exit(main())
