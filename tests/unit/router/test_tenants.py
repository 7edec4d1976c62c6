import os

import pytest
from unit.router.rig import no_free_descriptors

from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake.api_key_auth import Tenant, Tenants

KEY = bytes(range(32))


@pytest.fixture
def folder(tmp_path):
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "red").write_text("# rotated in May\n\nred-1\n  red-2  \n")
    (keys / "blue").write_text("blue-1")
    return keys


def ask(tenants, *values):
    return tenants.authenticate([(b"host", b"x"), *((b"authorization", value) for value in values)])


def denied(tenants, *values):
    with pytest.raises(RequestError) as caught:
        ask(tenants, *values)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    return True


def test_key_belongs_to_the_tenant_of_its_file(folder):
    tenants = Tenants(folder, KEY)
    for key in ("red-1", "red-2", "blue-1"):
        assert ask(tenants, f"Bearer {key}".encode()).name == key[:-2]
    assert ask(tenants, b"bearer  blue-1 ").name == "blue"
    assert (tenants.problems, tenants.authenticating) == ((), True)


SCHEMES = [b"", b"Bearer", b"Bearer ", b"Basic red-1", b"red-1"]
KEYS = [b"red-3", b"RED-1", b"red-1 red-2", b"# rotated in May", b"\xff\xfe"]


@pytest.mark.parametrize(
    "values",
    [(), (b"Bearer red-1", b"Bearer red-1"), *((value,) for value in SCHEMES), *((b"Bearer " + key,) for key in KEYS)],
)
def test_invalid_credentials_are_a_401(folder, values):
    assert denied(Tenants(folder, KEY), *values)


def test_salts_differ_by_tenant_and_agree_between_routers(folder):
    red, blue = (ask(Tenants(folder, KEY), key) for key in (b"Bearer red-1", b"Bearer blue-1"))
    assert red.salt != blue.salt
    assert red == ask(Tenants(folder, KEY), b"Bearer red-2")
    assert red.salt != ask(Tenants(folder, bytes(32)), b"Bearer red-1").salt
    assert red.salt.startswith("t1-")
    assert len(red.salt) == 67


def test_without_keys_there_is_one_tenant_without_salt_or_none_where_keys_are_required(tmp_path):
    tenants = Tenants(tmp_path / "absent", KEY)
    assert ask(tenants) == ask(tenants, b"Bearer whatever") == Tenant("", None)
    assert not tenants.authenticating
    tenants = Tenants(tmp_path / "absent", KEY, required=True)
    assert denied(tenants, b"Bearer whatever")
    assert tenants.problems


def test_changes_are_seen_when_the_folder_is_read_again(folder):
    tenants = Tenants(folder, KEY)
    (folder / "red").write_text("red-3")
    (folder / "blue").unlink()
    (folder / "green").write_text("green-1")
    assert ask(tenants, b"Bearer red-1").name == "red"
    tenants.refresh()
    assert ask(tenants, b"Bearer red-3").name == "red"
    assert ask(tenants, b"Bearer green-1").name == "green"
    assert denied(tenants, b"Bearer red-1")
    assert denied(tenants, b"Bearer blue-1")


def test_a_key_of_equal_length_is_seen_whatever_time_its_file_claims(folder):
    tenants = Tenants(folder, KEY)
    before = (folder / "red").stat()
    (folder / "red").write_text((folder / "red").read_text().replace("red-1", "red-9"))
    os.utime(folder / "red", ns=(before.st_atime_ns, before.st_mtime_ns))
    tenants.refresh()
    assert ask(tenants, b"Bearer red-9").name == "red"
    assert denied(tenants, b"Bearer red-1")


def test_mounted_secret_is_followed_through_its_links(tmp_path):
    for version, key in (("..v1", "old"), ("..v2", "new")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "red").write_text(key)
    (tmp_path / "..data").symlink_to("..v1")
    (tmp_path / "red").symlink_to("..data/red")
    tenants = Tenants(tmp_path, KEY)
    assert ask(tenants, b"Bearer old").name == "red"
    (tmp_path / "..next").symlink_to("..v2")
    os.replace(tmp_path / "..next", tmp_path / "..data")
    tenants.refresh()
    assert ask(tenants, b"Bearer new").name == "red"
    assert denied(tenants, b"Bearer old")


def test_authentication_is_never_switched_off(folder):
    tenants = Tenants(folder, KEY)
    folder.rename(folder.with_name("elsewhere"))
    tenants.refresh()
    assert denied(tenants, b"Bearer red-1")
    assert denied(tenants)
    folder.with_name("elsewhere").rename(folder)
    tenants.refresh()
    assert ask(tenants, b"Bearer red-1").name == "red"


def test_a_process_without_free_files_keeps_its_keys(folder):
    tenants = Tenants(folder, KEY)
    (folder / "red").write_text("red-3")
    with no_free_descriptors():
        tenants.refresh()
        assert ask(tenants, b"Bearer blue-1").name == "blue"
        assert denied(tenants, b"Bearer red-3")
    tenants.refresh()
    assert ask(tenants, b"Bearer red-3").name == "red"


@pytest.mark.parametrize("required", [True, False])
def test_keys_that_were_never_read_are_no_401_and_no_open_door(folder, required):
    with no_free_descriptors():
        tenants = Tenants(folder, KEY, required=required)
        with pytest.raises(RequestError) as caught:
            ask(tenants, b"Bearer blue-1")
    assert (caught.value.status, caught.value.code) == (503, "keys_unreadable")
    tenants.refresh()
    assert ask(tenants, b"Bearer blue-1").name == "blue"
    assert denied(tenants, b"Bearer red-3")


def test_new_keys_switch_authentication_on(tmp_path):
    tenants = Tenants(tmp_path / "keys", KEY)
    ask(tenants)
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "red").write_text("red-1")
    tenants.refresh()
    assert denied(tenants)
    assert ask(tenants, b"Bearer red-1").name == "red"


def test_key_shared_by_two_tenants_is_refused(folder):
    (folder / "green").write_text("green-1\nred-1\n")
    tenants = Tenants(folder, KEY)
    assert denied(tenants, b"Bearer red-1")
    assert ask(tenants, b"Bearer red-2").name == "red"
    assert ask(tenants, b"Bearer green-1").name == "green"
    assert len(tenants.problems) == 1
    assert "green, red" in tenants.problems[0]
    assert "red-1" not in tenants.problems[0]


def test_files_without_keys_are_problems(folder):
    (folder / "empty").write_text("\n# nothing\n")
    (folder / "subfolder").mkdir()
    (folder / "huge").write_bytes(b"x" * (1 << 20) + b"x")
    tenants = Tenants(folder, KEY)
    assert {problem.split(":")[0] for problem in tenants.problems} == {"empty", "subfolder", "huge"}
    assert ask(tenants, b"Bearer blue-1").name == "blue"
