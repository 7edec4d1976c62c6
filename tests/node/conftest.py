"""The one-node cluster and the images of the tests that run real pods. Where they cannot be made, tests say why."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from node.pause import write_pause
from node.plane import Node, Programs, node

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tests" / "tools"
CANNOT = 3  # exit status of the tools: not on this machine, reason on stderr
CNI = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))


def made_by(script: str, *arguments: str) -> str:
    """Run one of the tools and return what it printed; a machine on which it cannot run skips the test."""
    made = subprocess.run(
        [sys.executable, str(TOOLS / script), *arguments], capture_output=True, text=True, check=False
    )
    if made.returncode == CANNOT:
        pytest.skip(f"not run: {made.stderr.strip().splitlines()[-1]}")
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


@pytest.fixture(scope="session")
def programs() -> Programs:
    """Kubernetes' commands, built when they are not there yet."""
    node_bin = Path(made_by("node_env.py"))  # first: it says what the machine lacks
    return Programs(Path(made_by("kube_env.py")), node_bin, next(path for path in CNI if (path / "bridge").is_file()))


@pytest.fixture(scope="session")
def bare(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A cluster of one node that runs nothing yet."""
    folder = tmp_path_factory.mktemp("node")
    write_pause(folder / "pause.tar")
    with node(folder / "run", programs, folder / "pause.tar") as made:
        yield made
