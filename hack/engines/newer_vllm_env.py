"""Build the virtual environment of a newer vLLM, of which there is no CPU build. Prints its path.

    python -m hack.engines.newer_vllm_env            # builds it, or finds it ready; prints the path
    python -m hack.engines.newer_vllm_env --where    # prints the path only

It holds the Python code of the one wheel, a CUDA build, and takes everything else from vLLM's environment
(``vllm_env.py``). Scheduler, cache manager and events need no compiled part, so those are removed. An engine needs
them; with ``MMROUTER_TESTED_KERNELS`` in its environment it loads those of the tested release (``tested_kernels.py``).
``MMROUTER_VLLM_WHEEL`` takes another release: its line of a requirements file, with the hash (``adopt.py``). Exit
status: ``hack/build_once.py``.
"""

import inspect
import os
import shutil
import sys
from functools import partial
from pathlib import Path

from hack.build_once import FailedError, cache_dir, digest, main, pip_install, run
from hack.engines import vllm_env
from hack.engines.vllm_env import make

WHEEL = os.environ.get("MMROUTER_VLLM_WHEEL") or (
    "vllm==0.33.0 --hash=sha256:4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa"
)
"""0.33.0 is the first release whose hashes cover the next tokens beside a drafter."""
NEWER = WHEEL.split()[0].removeprefix("vllm==")
MISSING = ("orjson==3.13.0",)
"""What an engine of the release imports and the tested one does not."""
KERNELS = Path(__file__).with_name("tested_kernels.py")
ENABLED = "import os; 'MMROUTER_TESTED_KERNELS' in os.environ and __import__('tested_kernels').install()\n"
SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"


def env_dir() -> Path:
    return cache_dir() / "engines" / f"vllm-{NEWER}-code"


def recipe() -> str:
    return digest(WHEEL, vllm_env.recipe(), inspect.getsource(build))


def build(env: Path) -> None:
    full = vllm_env.env_dir()
    make(full, vllm_env.recipe(), vllm_env.build, (vllm_env.additions(), vllm_env.add))
    python = str(env / "bin" / "python")
    site, shared = (Path(run([str(at / "bin" / "python"), "-c", SITE], "python")) for at in (env, full))
    wanted = env / "requirements.txt"
    wanted.write_text(f"{WHEEL}\n")
    arguments = ("--no-deps", "--require-hashes", "--no-compile", "--requirement", str(wanted))
    pip_install(python, arguments, f"pip install of vllm {NEWER}")
    for compiled in (site / "vllm").rglob("*.so"):
        compiled.unlink()
    # A site folder that another one adds comes behind it, so the newer code hides the tested one.
    (site / "tested_release.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")
    code = "import os; os.environ['VLLM_TARGET_DEVICE'] = 'cpu'; import vllm.v1.core.sched.scheduler; "
    version = run([python, "-c", f"{code}import sys, vllm; sys.stdout.write(vllm.__version__)"], "import of vllm")
    if not version.endswith(NEWER):
        raise FailedError(f"the environment holds vLLM {version!r}, not {NEWER}")


def additions() -> str:
    """Return a digest of everything that is added to an environment that is ready."""
    return digest(*MISSING, ENABLED, KERNELS.read_text(), inspect.getsource(add))


def add(env: Path) -> None:
    """Add what an engine needs and the code alone does not."""
    python = str(env / "bin" / "python")
    site = Path(run([python, "-c", SITE], "python"))
    pip_install(python, ["--no-deps", *MISSING], "pip install of what the release needs")
    shutil.copyfile(KERNELS, site / KERNELS.name)
    (site / "tested_kernels.pth").write_text(ENABLED)


if __name__ == "__main__":
    maker = partial(make, recipe=recipe(), build=build, more=(additions(), add))
    sys.exit(main("the environment of a newer vLLM", env_dir(), maker))
