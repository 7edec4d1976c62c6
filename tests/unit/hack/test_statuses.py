"""A tool says whether the machine lacks something or something is broken, and a test that needs it skips or fails."""

import os
import subprocess
import sys
from pathlib import Path

import artefacts as making
import pytest
from artefacts import build_images, made_by

from hack.machine import PROGRAMS

TOOLS = making.TOOLS
GO = """\
#!/bin/sh
case "$1" in
  env) echo go1.99;;
  list) echo "dial tcp: no route" >&2; exit $UNREACHED;;
  *) printf "one\\ntwo: undefined\\n" >&2; exit 1;;
esac
"""
"""A Go that builds nothing, and reaches modules or does not."""
MMDEBSTRAP = "#!/bin/sh\nprintf 'one\\nE: two\\n' >&2\nexit 25\n"
APT = "#!/bin/sh\necho 'E: no route' >&2\nexit $UNREACHED\n"
BUILDAH = """\
#!/bin/sh
case "$*" in
  *" images"|images|*inspect*) exit 0;;
  *) echo "STEP 1"; printf "one\\nERROR: two\\n" >&2; exit 125;;
esac
"""
"""A buildah that works, on a Dockerfile that does not."""
CARGO = """\
#!/bin/sh
[ $UNREACHED -eq 0 ] || why="failed to download "
printf "one\\nerror: ${why}two\\n" >&2
exit 101
"""
"""A cargo that reaches its registry, or does not, and fetches nothing."""
RUSTC = "#!/bin/sh\necho 'rustc 1.99.0'\n"
PYTHON = """\
#!/bin/sh
case "$*" in
  *"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python";;
  *" download "*) exit $UNREACHED;;
  *" install "*) printf "one\\nERROR: two\\n" >&2; exit 1;;
esac
"""
"""An interpreter whose pip installs nothing, and reaches an index or does not."""
AS_ROOT = "import os, sys; os.geteuid = lambda: 0\n"
RUN = {
    "kube_env": "import kube_env as it",
    "helm_env": "import helm_env as it",
    "workflow_env": "import workflow_env as it",
    "native_env": "import native_env as it",
    "node_env": "import machine; machine.cni_folder = lambda: '/'\nimport node_env as it",
    "base_image": "import base_image as it; it.release = lambda: 'any'; it.sources = lambda: [it.Path('/dev/null')]",
    "vllm_env": "import vllm_env as it; it.make = it.partial(it.make, recipe='', build=it.build)",
    "sglang_env": "import sglang_env as it; it.make = it.partial(it.make, recipe='', build=it.build)",
}
"""Tool -> how it is loaded on any machine: what is not asked here, it is told."""
MAIN = "\nfor module in list(sys.modules.values()):\n    if hasattr(module, 'FREE_GB'): module.FREE_GB = 0\n"
MAIN += "sys.argv = ['it']\nimport vllm_env\nsys.exit(vllm_env.main('it', it.env_dir(), it.make))\n"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with commands that are there and fail."""
    folder = tmp_path / "bin"
    folder.mkdir()
    texts = {"go": GO, "mmdebstrap": MMDEBSTRAP, "apt-get": APT, "buildah": BUILDAH, "python3.11": PYTHON}
    texts |= {"cargo": CARGO, "rustc": RUSTC, "cc": "#!/bin/sh\n"}
    for name, text in {**dict.fromkeys(PROGRAMS, "#!/bin/sh\n"), **texts}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def ran(programs: Path, code: str, reached: bool, **named: str) -> "subprocess.CompletedProcess[str]":
    wheels = programs.parent / "wheels"
    wheels.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MMROUTER_")}
    env = {
        **kept,
        **named,
        "PATH": f"{programs}:/usr/bin:/bin",
        "PYTHONPATH": str(TOOLS),
        "MMROUTER_CACHE": str(programs.parent / "cache"),
        "MMROUTER_WHEELS": str(wheels),
        "MMROUTER_ENGINE_PYTHON": str(programs / "python3.11"),
        "UNREACHED": str(int(not reached)),
    }
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)


@pytest.mark.parametrize("tool", RUN)
@pytest.mark.parametrize(("reached", "status"), [(True, 1), (False, 3)])
def test_a_build_that_was_tried_has_failed_unless_nothing_could_be_fetched(
    programs: Path, tool: str, reached: bool, status: int
) -> None:
    if tool in ("vllm_env", "sglang_env") and os.uname().machine != "x86_64":
        pytest.skip("not run: engines are for x86_64")
    done = ran(programs, f"{AS_ROOT}{RUN[tool]}{MAIN}", reached)
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    *shown, reason = done.stderr.splitlines()
    assert "one" in shown
    assert " failed: " in reason
    assert "two" in reason
    assert ("reaches no" in reason) == (not reached)


@pytest.mark.parametrize(("reached", "status"), [(True, 1), (False, 3)])
def test_a_dockerfile_that_does_not_build_is_a_failure_unless_pip_reaches_no_index(
    programs: Path, reached: bool, status: int
) -> None:
    (programs / "cargo").unlink()  # nor is the compiled form built
    told = f"import sys, images; images.unreached = lambda python: {'' if reached else 'pip reaches no index'!r}\n"
    done = ran(programs, f"{told}sys.argv = ['images']\nsys.exit(images.main())", reached, MMROUTER_BUILDER="buildah")
    assert done.returncode == status, done.stderr
    assert "STEP 1" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("buildah build failed: ERROR: two")


def test_pip_is_asked_whether_it_reaches_its_index(programs: Path) -> None:
    code = "import sys, vllm_env; print(vllm_env.unreached(sys.argv[1]))"
    code = code.replace("sys.argv[1]", repr(str(programs / "python3.11")))
    assert ran(programs, code, True).stdout == "\n"
    (programs.parent / "wheels").rmdir()
    assert ran(programs, code, False).stdout == "pip reaches no index\n"


@pytest.mark.parametrize(
    ("script", "status"), [("e2e/one_node_cluster.py", 3), ("e2e/prepare.py", 0), ("cluster/prepare.py", 0)]
)
def test_where_nothing_can_be_made_a_cluster_says_so_and_what_comes_before_the_tests_is_no_failure(
    tmp_path: Path, script: str, status: int
) -> None:
    cache = tmp_path / "file"
    cache.touch()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MMROUTER_")}
    command = [sys.executable, str(TOOLS.parent / "tests" / script)]
    done = subprocess.run(command, capture_output=True, text=True, env={**kept, "MMROUTER_CACHE": str(cache)})
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.splitlines()[-1].startswith(("cannot write ", "a node of a cluster needs "))


def test_what_fails_before_the_tests_of_real_pods_is_a_failure(programs: Path) -> None:
    (programs / "kubectl").symlink_to("/bin/true")
    script = str(TOOLS.parent / "tests" / "e2e" / "prepare.py")
    code = f"import runpy, sys; runpy.run_path({script!r}, run_name='__main__')"
    done = ran(programs, code, True, MMROUTER_KUBECONFIG="any")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("go install of helm.sh/helm")


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the tests take their tools from."""
    monkeypatch.setattr(making, "TOOLS", tmp_path)
    return tmp_path


SAYS = "import sys; print('made'); print('one\\ntwo: undefined\\nit failed', file=sys.stderr); sys.exit({})"
ENDED = (pytest.fail.Exception, pytest.skip.Exception)
"""Both: of one that is not expected, this module's own test would be skipped."""


def test_a_tool_that_fails_fails_the_test_with_its_last_lines(tool: Path) -> None:
    (tool / "it.py").write_text(SAYS.format(1))
    with pytest.raises(ENDED, match=r"^it\.py failed:\none\ntwo: undefined\nit failed$") as raised:
        made_by("it.py")
    assert raised.type is pytest.fail.Exception


def test_a_tool_that_cannot_skips_the_test_with_its_reason(tool: Path) -> None:
    (tool / "it.py").write_text(SAYS.format(3))
    with pytest.raises(ENDED, match=r"^not run: it failed$") as raised:
        made_by("it.py")
    assert raised.type is pytest.skip.Exception


def test_a_tool_that_succeeds_gives_what_it_printed(tool: Path) -> None:
    (tool / "it.py").write_text(SAYS.format(0))
    assert made_by("it.py") == "made"


def test_images_are_built_on_the_base_that_is_named_and_keep_their_layers_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    def make(script: str, *arguments: str, **env: str) -> str:
        called.append((script, arguments, env))
        return "a:1 /a.tar\nb:1 /b.tar" if script == "images.py" else "/cache/base"

    monkeypatch.delenv("MMROUTER_BASE_IMAGE", raising=False)
    assert build_images(tmp_path, make) == [Path("/a.tar"), Path("/b.tar")]
    assert called[-1] == (
        "images.py",
        (f"--export={tmp_path}", "--storage=/cache/storage"),
        {"MMROUTER_BASE_IMAGE": "/cache/base/base.tar"},
    )
    called.clear()
    monkeypatch.setenv("MMROUTER_BASE_IMAGE", "named:1")
    build_images(tmp_path, make)
    assert [script for script, arguments, _ in called if "--where" not in arguments] == ["images.py"]
    assert called[-1][2] == {"MMROUTER_BASE_IMAGE": "named:1"}
