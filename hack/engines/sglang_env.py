"""Build the virtual environment of the real SGLang: 0.5.23 with a CPU build of PyTorch. Prints its path.

    python -m hack.engines.sglang_env            # builds it, or finds it ready; prints the path
    python -m hack.engines.sglang_env --where    # prints the path only

It lies beside vLLM's and takes the CPU build of PyTorch from the same places (``vllm_env.py``). The wheel is the
published one, except for how its processes start. Requirements that exist for CUDA only are left out, and
``sglang_stubs`` replaces the compiled CPU kernels, which no package index has. Exit status: ``hack/build_once.py``.
"""

import inspect
import os
import re
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

from hack.build_once import CannotMakeError, cache_dir, digest, main, pip_install, run
from hack.engines.vllm_env import (
    NIXL,
    SELDOM,
    SITE_FILE,
    TORCH,
    collect_seldom,
    make,
    mend,
    rest_between_polls,
    wheel_folders,
)

SGLANG = "0.5.23"
TRANSFORMERS = "5.19.0"  # part of the identity of an image (docs/families.md), so it never floats
STUBS = Path(__file__).with_name("sglang_stubs")
# Requirements of the wheel, except those that need CUDA, and protobuf, which one of these needs. Versions are those of
# its own pins.
REQUIREMENTS = (
    *("aiohttp", "anthropic", "apache-tvm-ffi==0.1.11", "blobfile==3.0.0", "datasets", "distro", "easydict", "einops"),
    *("fastapi", "gguf", "interegular", "ipython", "llguidance>=1.7.6,<2", "loguru", "mistral_common>=1.11.5"),
    *("modelscope", "msgspec", "ninja", "numba==0.65.1", "numpy", "nvidia-ml-py", "openai==2.8.0"),
    *("openai-harmony==0.0.4", "orjson", "outlines==0.1.11", "packaging", "partial_json_parser", "pillow"),
    *("prometheus-client", "protobuf", "psutil", "py-spy", "pybase64", "pydantic", "python-dateutil<3"),
    *("python-multipart", "pyzmq>=25.1.2", "regex", "requests", "scipy", "sentencepiece==0.2.1", "setproctitle"),
    *("soundfile==0.13.1", "tiktoken", "tokenizers==0.23.2", "tqdm", "triton", "uvicorn>=0.51", "uvloop"),
    *("watchfiles", "xxhash"),
    "zstandard",
)
WITHOUT_THEIR_REQUIREMENTS = (
    *("torchvision", "timm==1.0.25", "compressed-tensors==0.18.0", "torch_memory_saver", "xgrammar==0.2.7"),
    f"sglang=={SGLANG}",
)
STARTS = r'mp\.set_start_method\("(?:spawn|fork)", force=True\)'
FORKS = 'mp.set_start_method("fork", force=True)'
"""An engine is three processes, and with ``spawn`` two of them import again what the first one has loaded: two thirds
of the start-up CPU. The first process has a single thread when it forks, so forking is safe."""


DEVICE_MEMORY = r'"VRAM": nixlBind\.(?:VRAM|DRAM)_SEG,'
IS_HOST_MEMORY = '"VRAM": nixlBind.DRAM_SEG,'
"""An engine tells NIXL that its blocks are in a device's memory, which on a CPU is the host's. NIXL refuses addresses
that are not in the memory named."""
UNREGISTERED = '        "cpu": lambda dims, dtype, device, allocator, **_: allocator.allocate(dims, dtype, device),\n'
BEFORE_OTHERS = '        "npu": alloc_with_pin_memory,\n'
"""The host memory of a hierarchical cache, which SGLang registers with CUDA for every device that it does not name."""
COPIES = """else:

    def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
        for source, target in zip(src_layers, dst_layers):
            target[dst_indices] = source[src_indices]


"""
AFTER_KERNELS = "if _is_npu:\n    from sgl_kernel_npu"
"""Copies between that memory and the cache. SGLang has kernels for them on GPUs and XPUs, and none on CPUs."""


def env_dir() -> Path:
    return cache_dir() / "engines" / f"sglang-{SGLANG}-cpu"


def recipe() -> str:
    """Return a digest of everything that decides what the environment holds."""
    stubs = (file.read_text() for file in sorted(STUBS.rglob("*.py")))
    versions = (SGLANG, TORCH, TRANSFORMERS, *REQUIREMENTS, *WITHOUT_THEIR_REQUIREMENTS)
    return digest(*versions, inspect.getsource(build), SITE_FILE.read_text(), *stubs)


def build(env: Path) -> None:
    python = str(env / "bin" / "python")
    with tempfile.TemporaryDirectory(dir=env, prefix="wheels-") as made:
        links = [flag for folder in wheel_folders(Path(made)) for flag in ("--find-links", str(folder))]
        index = os.environ.get("MMROUTER_TORCH_INDEX")
        extra = ["--extra-index-url", index] if index else []
        wanted = (f"torch=={TORCH}", f"transformers=={TRANSFORMERS}", *REQUIREMENTS)
        what = "pip install (MMROUTER_WHEELS names a folder, MMROUTER_TORCH_INDEX an index, with the CPU torch)"
        pip_install(python, [*links, *extra, *wanted], what)
    pip_install(python, ["--no-deps", *WITHOUT_THEIR_REQUIREMENTS], "pip install of sglang")
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], "python"))
    shutil.copyfile(SITE_FILE, site / "mmrouter_vllm_site.py")
    (site / "mmrouter_vllm_site.pth").write_text("import mmrouter_vllm_site; mmrouter_vllm_site.install()\n")
    shutil.copytree(STUBS, site, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    code = "import torchvision, transformers, sglang.launch_server, sglang.version as v; print(v.__version__)"
    version = run([python, "-c", code], "import of sglang")
    if version != SGLANG:
        raise CannotMakeError(f"the environment holds SGLang {version!r}, not {SGLANG}")


def additions() -> str:
    """Return a digest of everything that is added to an environment that is ready."""
    functions = (add, collect_seldom, mend, rest_between_polls)
    tier = (UNREGISTERED, BEFORE_OTHERS, COPIES, AFTER_KERNELS)
    texts = (STARTS, FORKS, SELDOM, DEVICE_MEMORY, IS_HOST_MEMORY, *tier, *NIXL)
    return digest(*texts, *(inspect.getsource(each) for each in functions))


def add(env: Path) -> None:
    """Have an engine's processes start with what the first one has loaded, look for garbage less often, hand over
    blocks by NIXL from a CPU's memory, and keep copies of blocks in it.
    """
    python = str(env / "bin" / "python")
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], "python"))
    engine = site / "sglang" / "srt" / "entrypoints" / "engine.py"
    mend(engine, STARTS, FORKS, "how SGLang starts its processes")
    pip_install(python, ["--no-deps", *NIXL], "pip install of NIXL")
    transfers = rest_between_polls(site)
    mend(transfers, DEVICE_MEMORY, IS_HOST_MEMORY, "what NIXL calls a device's memory")
    pools = site / "sglang" / "srt" / "mem_cache" / "pool_host"
    allocators, copies = pools / "common.py", pools / "mha.py"
    for file, text, anchor, what in (
        (allocators, UNREGISTERED, BEFORE_OTHERS, "how SGLang allocates host memory"),
        (copies, COPIES, AFTER_KERNELS, "how SGLang copies blocks to host memory"),
    ):
        mend(file, f"(?:{re.escape(text)})?{re.escape(anchor)}", text + anchor, what)
    files = (engine, transfers, allocators, copies)
    run([python, "-m", "compileall", "-q", *map(str, files)], "compileall")
    run([python, "-c", "from nixl._api import nixl_agent, nixl_agent_config"], "import of nixl")
    collect_seldom(site)


if __name__ == "__main__":
    maker = partial(make, recipe=recipe(), build=build, more=(additions(), add))
    sys.exit(main("the environment of the real SGLang", env_dir(), maker))
