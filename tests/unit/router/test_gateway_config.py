"""The gateway's file of aliases: what is refused names its field, and a file that changes is read again."""

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import pytest

from mmrouter_router.gateway import config
from mmrouter_router.gateway.config import ConfigError, Target, follow, load, parse

GOOD = "models: {m: {to: [{deployment: a, weight: 95}, {deployment: b, weight: 5, model: adapter}]}}"


def test_a_file_gives_the_targets_of_each_alias() -> None:
    assert parse(GOOD.encode()) == {
        "m": [Target(deployment="a", weight=95), Target(deployment="b", weight=5, model="adapter")]
    }
    assert parse(b'{"models": {"m": {"to": [{"deployment": "a"}]}}}') == {"m": [Target(deployment="a", weight=1)]}


def test_an_empty_file_has_no_alias() -> None:
    assert parse(b"# none yet\n") == {}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("model: {}", "models: Field required"),
        ("models: {gpt-4o: {}}", "models.gpt-4o.to: Field required"),
        ("models: {m: {to: []}}", "models.m.to: List should have at least 1 item"),
        ("models: {m: {to: [{deployment: a, wieght: 1}]}}", "models.m.to[0].wieght: Extra inputs are not permitted"),
        ("models: {m: {to: [{deployment: a}, {weight: 1}]}}", "models.m.to[1].deployment: Field required"),
        ("models: {m: {to: [{deployment: a, weight: -1}]}}", "models.m.to[0].weight: Input should be greater than"),
        ("models: {m: {to: [{deployment: a, weight: 0.5}]}}", "models.m.to[0].weight: Input should be a valid integer"),
        ("models: {m: {to: [{deployment: a, weight: 0}]}}", "models.m.to: at least one weight must be above 0"),
        ("models: {m: {to: [{deployment: a}, {deployment: a}]}}", "models.m.to: the deployment a stands in it twice"),
        ("- 1", "the file: Input should be"),
        ("models: {m: [", "it cannot be read"),
        ("models: {? [1] : 2}", "it cannot be read"),
        ("2024-01-01", "it cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_field(tmp_path: Path, text: str, fault: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(file)
    assert str(refused.value).startswith(f"{file}: {fault}")


def test_an_absent_file_and_one_that_is_too_large_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "absent")
    with pytest.raises(ConfigError, match="larger than"):
        parse(b"#" * (config.MAX_BYTES + 1))


async def test_a_changed_file_is_used_and_a_bad_one_leaves_the_last_good_one(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(config, "CHECK_SECONDS", 0.01)
    used, refused = asyncio.Queue(), asyncio.Queue()
    versions = iter(range(10))

    def replace(text: str) -> None:
        """As a kubelet does: a link to another folder takes the place of the first."""
        folder = tmp_path / f"v{next(versions)}"
        folder.mkdir()
        (folder / "gateway.yaml").write_text(text)
        (tmp_path / "new").symlink_to(folder)
        os.replace(tmp_path / "new", tmp_path / "data")

    replace(GOOD)
    file = tmp_path / "data" / "gateway.yaml"
    seen = config.stamp(file)
    # A change before the first look is one, too.
    replace("models: {m: {to: [{deployment: b}]}}")
    task = asyncio.create_task(follow(file, used.put_nowait, refused.put_nowait, seen))
    async with asyncio.timeout(30):
        assert await refused.get() is False
        assert [target.deployment for target in (await used.get())["m"]] == ["b"]
    async with asyncio.timeout(30):
        replace("models: {m: {to: [{deployment: a, weight: x}]}}")
        assert await refused.get() is True
        assert "the last good configuration stays in use" in caplog.text
        assert "models.m.to[0].weight" in caplog.text
        assert used.empty()
        replace("models: {n: {to: [{deployment: b}]}}")
        assert await refused.get() is False
        assert await used.get() == {"n": [Target(deployment="b")]}
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
