"""The commands as processes: installed scripts, flags, start, drain and failure."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

import mmrouter_sim
from mmrouter_sim.model import find_folder
from mmrouter_sim.vllm.flags import parse

ROOT = Path(__file__).parents[3]


@pytest.fixture
def vllm(tmp_path):
    """The installed command, run as any program would run it."""
    path, _ = mmrouter_sim.install(tmp_path / "new" / "bin")
    return path


@asynccontextmanager
async def running(command, *args):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "sim")])
    process = await asyncio.create_subprocess_exec(
        str(command), *args, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": paths}
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def healthy(session, url):
    async with asyncio.timeout(20):
        while True:
            try:
                async with session.get(url + "/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.02)


def test_install_writes_an_executable_that_runs_this_interpreter(vllm):
    assert vllm.name == "vllm"
    assert os.access(vllm, os.X_OK)
    assert sys.executable in vllm.read_text()
    assert mmrouter_sim.install(vllm.parent)[0] == vllm  # again, over the first


async def test_a_process_serves_then_drains_on_sigterm_and_exits_cleanly(vllm, tiny, unused_port):
    port = unused_port(1)
    flags = ["--host", "127.0.0.1", "--port", str(port), "--shutdown-timeout", "30", "--sim-decode-ms", "1"]
    url = f"http://127.0.0.1:{port}"
    async with running(vllm, "serve", str(tiny), *flags) as process, aiohttp.ClientSession() as session:
        await healthy(session, url)
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 150, "ignore_eos": True, "stream": True}
        async with session.post(url + "/v1/chat/completions", json=body) as answer:
            await answer.content.readline()
            process.send_signal(signal.SIGTERM)
            rest = await answer.text()
        assert rest.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in rest
        async with asyncio.timeout(60):
            assert await process.wait() == 0


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["serve", "MODEL", "--no-such-flag"], 2, "--no-such-flag"),
        (["serve"], 2, "which model"),
        (["launch", "something", "MODEL"], 2, "something"),
        (["serve", "no/such-model"], 1, "neither a folder nor"),
        (["serve", "MODEL", "--max-model-len", "4000", "--num-gpu-blocks-override", "24"], 1, "maximum model length"),
        (["serve", "MODEL", "--kv-events-config", '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:x"}'],
         1, "event sockets"),
    ],
)  # fmt: skip
def test_invalid_settings_end_the_process_with_a_reason(args, status, words, tiny, capsys, caplog):
    from mmrouter_sim.__main__ import main

    try:
        code = main(["vllm", *(str(tiny) if arg == "MODEL" else arg for arg in args), "--port=0"][: len(args) + 2])
    except SystemExit as exit_:
        code = exit_.code
    assert code == status
    assert words in capsys.readouterr().err + caplog.text


def test_the_rendered_command_line_is_understood():
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "buffer_steps": 10000, "hwm": 10000}
    events |= {"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5657"}
    settings = parse([
        "serve", "/models/m", "--served-model-name", "qwen-vl", "--host", "127.1.0.3", "--port", "8000",
        "--block-size", "32", "--enable-prefix-caching", "--prefix-caching-hash-algo", "sha256_cbor",
        "--kv-events-config", json.dumps(events), "--enable-prompt-tokens-details",
        "--limit-mm-per-prompt", '{"image":32}', "--shutdown-timeout", "60", "--revision", "main",
        "--mm-processor-kwargs", '{"min_pixels":3136,"max_pixels":100352}', "--data-parallel-size", "2",
        "--tensor-parallel-size", "2", "--trust-remote-code", "--enforce-eager", "--load-format=dummy",
        "--max_num_seqs", "4", "--gpu-memory-utilization", "0.9", "--no-enable-chunked-prefill",
    ])  # fmt: skip
    assert settings.events.endpoint == "tcp://127.0.0.1:5557"
    assert (settings.block_size, settings.image_limit, settings.ranks, settings.max_seqs) == (32, 32, 2, 4)
    assert settings.processor == {"min_pixels": 3136, "max_pixels": 100352}
    assert settings.token_details
    assert settings.shutdown_seconds == 60


def test_every_rendered_flag_is_known(tiny):
    api = pytest.importorskip("mmrouter_lib.api")
    from mmrouter_lib.engines.vllm.launch import launch

    worker = {"name": "w", "role": "worker", "accelerator": {"kind": "cpu"}, "parallelism": {"data": 2, "tensor": 2}}
    engine = {"type": "vllm", "blockSize": 32, "processor": {"minPixels": 3136, "maxPixels": 100352}}
    spec = {"model": {"id": "a/b", "trustRemoteCode": True}, "engine": engine, "pools": [worker]}
    kind = {"apiVersion": "mmrouter.io/v1alpha1", "kind": "MMRouterDeployment", "metadata": {"name": "m"}}
    deployment = api.parse_deployment({**kind, "spec": spec})
    made = launch(deployment, deployment.spec.pools[0])
    settings = parse([*made.command[1:], *made.args])
    assert settings.model == "a/b"
    assert settings.events.publishes
    assert settings.events.hwm == 10_000


def test_simulator_flags_have_environment_variables(monkeypatch):
    monkeypatch.setenv("MMROUTER_SIM_SPEED", "8")
    monkeypatch.setenv("MMROUTER_SIM_BLOCKS", "77")
    monkeypatch.setenv("MMROUTER_SIM_REPLAY_STEPS", "5")
    settings = parse(["serve", "m"])
    assert (settings.cost.speed, settings.blocks, settings.events.buffer_steps) == (8.0, 77, 5)
    assert parse(["serve", "m", "--sim-speed", "2"]).cost.speed == 2.0
    assert parse(["serve", "m", "--num-gpu-blocks-override", "99"]).blocks == 99


def test_a_model_may_be_a_snapshot_in_the_hubs_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    hub = tmp_path / "models--org--name"
    (hub / "snapshots" / "abc").mkdir(parents=True)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("abc")
    assert find_folder("org/name", None) == hub / "snapshots" / "abc"
    assert find_folder("org/name", "abc") == hub / "snapshots" / "abc"
    with pytest.raises(ValueError, match="downloads nothing"):
        find_folder("org/name", "other")


def test_a_chat_template_is_a_file_or_itself(tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    assert parse(["serve", "m", "--chat-template", str(file)]).chat_template == "{{ messages }}"
    assert parse(["serve", "m", "--chat-template", "{{ 1 }}"]).chat_template == "{{ 1 }}"
