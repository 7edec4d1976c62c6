"""A tool's exit status tells a machine that lacks something from a failed build; tests skip or fail by it."""

import os
import subprocess
import sys
from pathlib import Path

import artefacts
import pytest
from artefacts import ROOT, build_images, run_tool_or_skip
from unit.hack.test_programs import command

from hack.cluster.go_programs import NODE_PACKAGES, SETS

GO = """\
case "$1" in
  env) echo go1.99;;
  list) echo "dial tcp: no route" >&2; exit $UNREACHED;;
  *) printf "one\\ntwo: undefined\\n" >&2; exit 1;;
esac
"""
"""A Go that builds nothing, and reaches modules or does not."""
MMDEBSTRAP = "printf 'one\\nE: two\\n' >&2\nexit 25"
APT = "echo 'E: no route' >&2\nexit $UNREACHED"
BUILDAH = """\
case "$*" in
  *" images"|images|*inspect*) exit 0;;
  *) echo "STEP 1"; printf "one\\nERROR: two\\n" >&2; exit 125;;
esac
"""
"""A buildah that works, on a Dockerfile that does not."""
CARGO = """\
[ $UNREACHED -eq 0 ] || why="failed to download "
printf "one\\nerror: ${why}two\\n" >&2
exit 101
"""
"""A cargo that reaches its registry, or does not, and fetches nothing."""
PYTHON = """\
case "$*" in
  *"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python";;
  *" download "*) exit $UNREACHED;;
  *" install "*) printf "one\\nERROR: two\\n" >&2; exit 1;;
esac
"""
"""An interpreter whose pip installs nothing, and reaches an index or does not."""
PRELUDE = """\
import os, sys
os.geteuid = lambda: 0
from hack import build_once
build_once.require_free = lambda *_: None
"""
"""As root, with enough free space."""
GO_SET = (
    "from hack.cluster import go_programs as it\nit.cni_folder = lambda: '/'\nsys.argv.append({!r})\nmain = it.main"
)
TOOL = "\nmain = lambda: build_once.main('it', it.env_dir(), it.make)"
ENGINE = "\nmain = lambda: build_once.main('it', it.env_dir(), lambda env: vllm_env.make(env, '', it.build))"
TOOLS = {
    **{name: GO_SET.format(name) for name in SETS},
    "native_wheel": f"from hack import native_wheel as it{TOOL}",
    "base_image": "from hack.images import base_image as it; it.release = lambda: 'any'; "
    f"it.sources = lambda: [it.Path('/dev/null')]{TOOL}",
    "vllm_env": f"from hack.engines import vllm_env; it = vllm_env; it.require_free = lambda *_: None{ENGINE}",
    "sglang_env": "from hack.engines import sglang_env as it, vllm_env; "
    f"vllm_env.require_free = lambda *_: None{ENGINE}",
    "older_sglang_env": "from hack.engines import older_sglang_env as it, vllm_env; "
    f"vllm_env.require_free = lambda *_: None{ENGINE}",
    "newer_vllm_env": "from hack.engines import newer_vllm_env as it, vllm_env; "
    f"vllm_env.require_free = lambda *_: None{ENGINE}",
}
"""Tool -> code that defines its ``main`` so that it builds on any machine."""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with commands that exist and fail."""
    folder = tmp_path / "bin"
    texts = {"go": GO, "mmdebstrap": MMDEBSTRAP, "apt-get": APT, "buildah": BUILDAH, "python3.11": PYTHON}
    texts |= {"cargo": CARGO, "rustc": "echo 'rustc 1.99.0'", "cc": ""}
    for name, text in {**dict.fromkeys((*NODE_PACKAGES, "ipset"), ""), **texts}.items():
        command(folder, name, text)
    return folder


def without_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("MMROUTER_")}


def ran(programs: Path, code: str, reached: bool, **extra: str) -> "subprocess.CompletedProcess[str]":
    wheels = programs.parent / "wheels"
    wheels.mkdir()
    env = {
        **without_settings(),
        **extra,
        "PATH": f"{programs}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "MMROUTER_CACHE": str(programs.parent / "cache"),
        "MMROUTER_WHEELS": str(wheels),
        "MMROUTER_ENGINE_PYTHON": str(programs / "python3.11"),
        "UNREACHED": str(int(not reached)),
    }
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(("reached", "status"), [(True, 1), (False, 3)])
def test_a_failed_build_has_status_1_and_one_that_reaches_no_index_status_3(
    programs: Path, tool: str, reached: bool, status: int
) -> None:
    if tool.endswith("_env") and os.uname().machine != "x86_64":
        pytest.skip("not run: engines are for x86_64")
    done = ran(programs, f"{PRELUDE}{TOOLS[tool]}\nsys.exit(main())", reached)
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    *shown, reason = done.stderr.splitlines()
    assert "one" in shown
    assert " failed: " in reason
    assert "two" in reason
    assert ("reaches no" in reason) == (not reached)


@pytest.mark.parametrize(("reached", "status"), [(True, 1), (False, 3)])
def test_a_failed_dockerfile_has_status_1_and_without_an_index_status_3(
    programs: Path, reached: bool, status: int
) -> None:
    (programs / "cargo").unlink()  # the compiled form is not built either
    unreached = "" if reached else "pip reaches no index"
    code = (
        f"import sys; from hack import build_once; build_once.unreached = lambda python: {unreached!r}\n"
        "from hack.images import build_images as it\n"
        "sys.argv = ['images']; sys.exit(it.main())"
    )
    done = ran(programs, code, reached, MMROUTER_BUILDER="buildah")
    assert done.returncode == status, done.stderr
    assert "STEP 1" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("buildah build failed: ERROR: two")


@pytest.mark.parametrize(("status", "asked"), [(0, ["uv"]), (2, ["uv", "pip"])])
def test_pip_installs_what_uv_does_not(programs: Path, status: int, asked: list[str]) -> None:
    log = programs.parent / "asked"
    command(programs, "uv", f'echo "uv $*" >> {log}; exit {status}')
    command(programs, "python3.11", f'echo "pip $*" >> {log}')
    code = (
        f"from hack import build_once; build_once.pip_install({str(programs / 'python3.11')!r}, ['--no-deps', 'a'], '')"
    )
    assert ran(programs, code, reached=True).returncode == 0
    lines = log.read_text().splitlines()
    assert [line.split()[0] for line in lines] == asked
    assert all(line.endswith(" --no-deps a") for line in lines)


def test_unreached_tries_pips_index(programs: Path) -> None:
    python = str(programs / "python3.11")
    code = f"from hack import build_once; print(build_once.unreached({python!r}))"
    assert ran(programs, code, True).stdout == "\n"
    (programs.parent / "wheels").rmdir()
    assert ran(programs, code, False).stdout == "pip reaches no index\n"


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (["e2e/one_node_cluster.py"], 3),
        (["e2e/prepare.py"], 0),
        (["e2e/prepare.py", "gateways"], 0),
        (["cluster/prepare.py"], 0),
    ],
)
def test_without_a_writable_cache_make_cluster_has_status_3_and_preparing_tests_is_no_failure(
    tmp_path: Path, script: list[str], status: int
) -> None:
    cache = tmp_path / "file"
    cache.touch()
    env = {**without_settings(), "MMROUTER_CACHE": str(cache)}
    done = subprocess.run([sys.executable, *script], cwd=ROOT / "tests", capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.splitlines()[-1].startswith(("cannot write ", "a node of a cluster needs "))


def test_a_failed_preparation_of_the_tests_with_real_pods_is_a_failure(programs: Path) -> None:
    (programs / "kubectl").symlink_to("/bin/true")
    script = str(ROOT / "tests" / "e2e" / "prepare.py")
    code = f"import runpy, sys; runpy.run_path({script!r}, run_name='__main__')"
    done = ran(programs, code, True, MMROUTER_KUBECONFIG="any")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("go install of helm.sh/helm")


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a tool that tests run as ``fake``."""
    (tmp_path / "hack").mkdir()
    monkeypatch.setattr(artefacts, "ROOT", tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path / "hack" / "fake.py"


PRINTS = "import sys; print('made'); print('one\\ntwo: undefined\\nit failed', file=sys.stderr); sys.exit({})"
ENDED = (pytest.fail.Exception, pytest.skip.Exception)
"""Both: an unexpected one of them would skip this module's own test."""


@pytest.mark.parametrize(
    ("status", "outcome", "text"),
    [
        (1, pytest.fail.Exception, r"^fake failed:\none\ntwo: undefined\nit failed$"),
        (3, pytest.skip.Exception, r"^not run: it failed$"),
    ],
)
def test_a_failed_tool_fails_the_test_and_a_lacking_machine_skips_it(
    tool: Path, status: int, outcome: type[Exception], text: str
) -> None:
    tool.write_text(PRINTS.format(status))
    with pytest.raises(ENDED, match=text) as raised:
        run_tool_or_skip("fake")
    assert raised.type is outcome


def test_a_tool_that_succeeds_gives_its_output(tool: Path) -> None:
    tool.write_text(PRINTS.format(0))
    assert run_tool_or_skip("fake") == "made"


def test_images_are_built_on_the_named_base_with_their_layers_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    def run(tool: str, *arguments: str, **env: str) -> str:
        called.append((tool, arguments, env))
        return "a:1 /a.tar\nb:1 /b.tar" if tool == "images.build_images" else "/cache/base"

    monkeypatch.delenv("MMROUTER_BASE_IMAGE", raising=False)
    assert build_images(tmp_path, run) == [Path("/a.tar"), Path("/b.tar")]
    assert called[-1] == (
        "images.build_images",
        (f"--export={tmp_path}", "--storage=/cache/storage"),
        {"MMROUTER_BASE_IMAGE": "/cache/base/base.tar"},
    )
    called.clear()
    monkeypatch.setenv("MMROUTER_BASE_IMAGE", "named:1")
    build_images(tmp_path, run)
    assert [tool for tool, arguments, _ in called if "--where" not in arguments] == ["images.build_images"]
    assert called[-1][2] == {"MMROUTER_BASE_IMAGE": "named:1"}
