"""Images of every family are, handed over, what vLLM's own front end makes of them: each tensor, id, place and mask."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conformance.conftest import Record
from conformance.pictures import picture
from conformance.processors.conftest import Ask
from conformance.vllm.conftest import FAMILIES

from mmrouter_handover.plugin.install import install


def test_handed_over_images_of_every_family_are_what_the_engine_would_have_made_of_them(
    ask: Ask, shrunk: Callable[[str], Path], tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "plugin")
    files = []
    for number, (wide, high) in enumerate(((224, 224), (336, 672), (1000, 700))):
        files.append(tmp_path / f"{number}.png")
        files[-1].write_bytes(picture(wide, high, seed=number))
    folders = {family: str(shrunk(repository)) for family, repository in FAMILIES.items()}
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    answers = ask(
        "vllm_handover.py", str(tmp_path / "plugin"), models=list(folders.values()), pictures=list(map(str, files))
    )
    for family, folder in folders.items():
        said = answers[folder]
        assert (said["differences"], said["again"], said["changed"]) == ([], [], True), family
        fields = ", ".join(f"{name} ({kind})" for name, kind in said["fields"])
        record(f"handed over {family}: 3 images", f"{said['bytes']} bytes: {fields}")
