"""Access to the node's shared folder, with real folders and users."""

import os
import stat
from pathlib import Path

import pytest

from mmrouter_sidecar.shared_memory.folder_access import MODE, SharedFolderError, main, open_folder

GROUP = 65533
OTHER_USER = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="not run: needs root, as the init container does")


def has_access_as(folder: Path, user: int, group: int) -> bool:
    """Open a folder from a process of another user, which has no capability; return whether that worked."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.chdir(folder.parent)  # the folders above it belong to root alone
            os.setgroups([])
            os.setgid(group)
            os.setuid(user)
            open_folder(Path(folder.name), GROUP)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs_root
def test_the_folder_and_new_files_belong_to_the_group(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o755)
    assert main([str(folder), str(GROUP)]) == 0
    status = folder.stat()
    assert (status.st_gid, stat.S_IMODE(status.st_mode)) == (GROUP, MODE)
    inside = folder / "made-by-root"
    inside.touch()
    assert inside.stat().st_gid == GROUP
    assert main([str(folder), str(GROUP)]) == 0  # a second pod finds it done


@needs_root
def test_an_owner_in_the_group_needs_no_capability(tmp_path: Path) -> None:
    """What the init container is: owner of the folder and member of the group, nothing more."""
    tmp_path.chmod(0o755)
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o755)
    os.chown(folder, OTHER_USER, OTHER_USER)
    assert has_access_as(folder, OTHER_USER, GROUP)
    assert (folder.stat().st_gid, stat.S_IMODE(folder.stat().st_mode)) == (GROUP, MODE)


@needs_root
def test_a_folder_of_another_user_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o755)
    assert not has_access_as(folder, OTHER_USER, GROUP)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(SharedFolderError):
        open_folder(tmp_path / "link", os.getgid())
    assert stat.S_IMODE(target.stat().st_mode) == 0o755


def test_a_missing_folder_and_wrong_usage_have_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none"), "1"]) == 1
    assert "No such file or directory" in capsys.readouterr().err
    assert main(["one"]) == main(["a", "b"]) == main([]) == 2
    assert "usage: mmrouter shared-memory" in capsys.readouterr().err


def test_outside_a_cluster_an_own_folder_suffices(tmp_path: Path) -> None:
    """There the group does not exist, and everything runs as one user."""
    folder = tmp_path / "mine"
    folder.mkdir(mode=0o700)
    open_folder(folder, os.getgid())
    assert os.access(folder, os.W_OK)
