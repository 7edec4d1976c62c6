"""The copy of an engine's certificate: rewritten in place at every change, never with a pair that does not match."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from unit.router.certificates import certificate, write_secret

from mmrouter_sidecar.engine_certificate import NAMES, CertificateCopy


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("secret", "copy"):
        (tmp_path / name).mkdir()
    return tmp_path / "secret", tmp_path / "copy"


def copied(folder: Path) -> tuple[bytes, ...]:
    return tuple((folder / name).read_bytes() for name in NAMES)


def test_files_keep_their_inodes_when_the_secret_changes_and_are_not_for_others(folders):
    copy, inodes = CertificateCopy(*folders), set()
    for number in (0, 1, 2):
        write_secret(folders[0], *certificate(number))
        copy.update()
        assert copied(folders[1]) == certificate(number)
        inodes.add(tuple((folders[1] / name).stat().st_ino for name in NAMES))
    assert len(inodes) == 1
    assert {(folders[1] / name).stat().st_mode & 0o007 for name in NAMES} == {0}


def test_a_pair_that_does_not_match_is_not_copied_and_logged_once(folders, caplog):
    copy = CertificateCopy(*folders)
    copy.update()
    assert not list(folders[1].iterdir())
    write_secret(folders[0], *certificate(0))
    copy.update()
    write_secret(folders[0], certificate(1)[0], certificate(2)[1])
    for _ in range(3):
        copy.update()
    assert copied(folders[1]) == certificate(0)
    assert caplog.text.count("keeps its certificate") == 2


def test_the_process_ends_in_order_as_the_first_one_of_its_container_has_to(folders):
    write_secret(folders[0], *certificate(0))
    places = {"MMROUTER_ENGINE_SECRET": str(folders[0]), "MMROUTER_ENGINE_TLS": str(folders[1])}
    code = "from mmrouter_sidecar.engine_certificate import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **places}, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        assert b"has a new certificate" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 0, "and not by the signal's default action, which such a process does not have"
