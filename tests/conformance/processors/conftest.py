"""Sizes and pictures for the processor tests, and the third-party processors that they compare with."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conformance.conftest import models_dir
from conformance.workload import picture

from hack.build_once import cache_dir

HERE = Path(__file__).parent
MLX_VLM = "0.7.10"
SIZES = 20_000
PICTURES = 300
UNITS = (14, 16, 28, 32, 336)

KINDS = [
    *[("PNG", mode) for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16")],
    *[("JPEG", mode) for mode in ("RGB", "L", "CMYK")] * 2,
    *[("WEBP", mode) for mode in ("RGB", "RGBA")],
    ("GIF", "P"),
]


@dataclass(frozen=True)
class Drawn:
    path: Path
    text: str


Ask = Callable[..., Any]


@pytest.fixture(scope="session")
def sizes() -> list[tuple[int, int]]:
    """Drawn sizes: any, small ones, ones beside a whole number of units, ones of simple ratios, and very thin ones."""
    draw = random.Random(20_261_121)

    def side() -> int:
        return round(2 ** draw.uniform(0, 13))

    def near() -> int:
        unit = draw.choice(UNITS)
        return max(1, unit * draw.randint(1, 4000 // unit) * draw.choice((1, 2)) // 2 + draw.randint(-1, 1))

    def one() -> tuple[int, int]:
        match draw.randrange(5):
            case 0:
                return draw.randint(1, 4096), draw.randint(1, 4096)
            case 1:
                return draw.randint(1, 200), draw.randint(1, 200)
            case 2:
                return near(), near()
            case 3:
                unit, wide, high = draw.randint(1, 500), draw.randint(1, 12), draw.randint(1, 12)
                return unit * wide, unit * high
        return side(), side()

    return [one() for _ in range(SIZES)]


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Drawn]:
    draw, folder = random.Random(300), tmp_path_factory.mktemp("pictures")
    drawn = []
    for number in range(PICTURES):
        form, mode = draw.choice(KINDS)
        long = round(2 ** draw.uniform(3, 9.6))
        wide, high = draw.sample([long, max(1, round(long / 2 ** draw.uniform(0, 4)))], 2)
        turned = draw.randint(1, 8) if form in ("JPEG", "WEBP", "PNG") and draw.random() < 0.5 else 1
        path = folder / f"{number}_{mode.replace(';', '')}_{wide}x{high}_{turned}.{form.lower()}"
        path.write_bytes(picture(wide, high, seed=number, form=form, mode=mode, turned=turned))
        drawn.append(
            Drawn(path, draw.choice(("What is this?", " Zwei  Räume\n", "図 <b>3</b>", "x" * draw.randint(1, 40))))
        )
    return drawn


@pytest.fixture(scope="session")
def ask(vllm_env: Path) -> Ask:
    def run(what: str, *arguments: str, **request: Any) -> Any:
        done = subprocess.run(
            [str(vllm_env / "bin" / "python"), str(HERE / "third_party.py"), what, *arguments],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="session")
def mlx_vlm() -> Path:
    """The wheel of mlx-vlm, from the package index or from an earlier run."""
    folder = cache_dir() / "processors"
    wheel = folder / f"mlx_vlm-{MLX_VLM}-py3-none-any.whl"
    if not wheel.is_file():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run(
            [*command, "--dest", str(folder), f"mlx-vlm=={MLX_VLM}"], capture_output=True, text=True, check=False
        )
        if done.returncode or not wheel.is_file():
            pytest.skip(f"not run: mlx-vlm {MLX_VLM} cannot be had from the package index")
    return wheel


@pytest.fixture(scope="session")
def model() -> Callable[[str], Path]:
    def find(name: str) -> Path:
        folder = models_dir() / name
        if not (folder / "tokenizer.json").is_file():
            pytest.skip(f"not run: no model folder {name} in MMROUTER_MODELS")
        return folder

    return find
