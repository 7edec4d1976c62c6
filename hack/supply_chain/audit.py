"""Compare the locked dependencies with a database of known vulnerabilities, by pip-audit in an environment of its own.

    python -m hack.supply_chain.audit              # fails where a locked version has a known vulnerability
    python -m hack.supply_chain.audit --optional   # prints what it finds, and always succeeds

Prints the age of ``requirements.lock`` first, because it is all that is known if the database is not reachable. The
database is OSV's (``api.osv.dev``); ``hack/supply_chain/audit.lock`` pins pip-audit. The result depends on the day, so
no test level runs this, but a separate job of continuous integration. Exit status: ``hack/build_once.py``.
"""

import argparse
import shutil
import sys
import time
from pathlib import Path

from hack.build_once import (
    CANNOT,
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

LOCK = ROOT / "requirements.lock"
OWN_LOCK = Path(__file__).with_name("audit.lock")
DAY = 86_400
FOUND = "known vulnerabilit"
"""Part of pip-audit's last line when it has found a vulnerability; its other failures do not print it."""


def lock_age_days() -> float | None:
    """Return the days since the lock was changed, ``None`` where git has no date of it."""
    done = captured(["git", "-C", str(ROOT), "log", "-1", "--format=%ct", "--", LOCK.name])
    shallow = captured(["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository"]).stdout.strip()
    text = done.stdout.strip()
    return (time.time() - int(text)) / DAY if text and shallow == "false" else None


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


def audit(program: Path) -> None:
    """Compare the lock with the database. Raises :class:`FailedError` where a version is vulnerable, and
    :class:`CannotMakeError` where the database cannot be read.
    """
    options = ("--require-hashes", "--disable-pip", "--vulnerability-service=osv", "--progress-spinner=off")
    done = captured([str(program), *options, f"--requirement={LOCK}"], env=quiet_env())
    if done.returncode == 0:
        note(last_line(done.stderr or done.stdout))
        return
    if FOUND in done.stderr:
        note(done.stdout.rstrip())
        raise FailedError(f"requirements.lock: {last_line(done.stderr)}")
    raise CannotMakeError(f"the database of vulnerabilities cannot be read ({last_line(done.stderr)})")


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Compare the locked dependencies with known vulnerabilities.")
    parser.add_argument("--optional", action="store_true", help="print what is found and exit with status 0")
    chosen = parser.parse_args()
    age = lock_age_days()
    note(f"requirements.lock was changed {age:.0f} days ago" if age is not None else "the lock's age is not known here")
    status = status_of(lambda: audit(auditor()))
    if status == CANNOT:
        note("audit: not run: see the reason above")
    return 0 if chosen.optional else status


if __name__ == "__main__":
    sys.exit(main())
