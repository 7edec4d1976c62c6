"""The commands as processes: installed scripts, flags, start, drain and failure."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path

import aiohttp
import pytest
from hub_server import COMMIT, Hub
from unit.engines.conftest import deployment, role

import mmrouter_sim
from mmrouter_lib.engines.launchers import LAUNCHERS
from mmrouter_lib.model_folder import hub_folder
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


MORE = {
    "vllm": ["--max_num_seqs", "4", "--load-format=dummy", "--no-enable-chunked-prefill", "--enforce-eager"],
    "sglang": ["--max_running_requests", "4", "--load-format=dummy", "--mm-preprocess-cache-size-mb", "256"],
}


@pytest.mark.parametrize("engine", MORE)
def test_the_rendered_command_line_and_flags_of_users_are_understood(engine):
    worker = role("worker", "cpu", parallelism={"data": 2, "tensor": 2}, blockSize=32, args=MORE[engine])
    fields = {"type": engine, "processor": {"maxPixels": 100352}}
    model = {"id": "a/b", "revision": "main", "trustRemoteCode": True}
    resource = deployment(worker, engine=fields, model=model, routing={"media": {"maxImages": 5}})
    made = LAUNCHERS[engine].launch(resource, resource.spec.pools[0])
    settings = import_module(f"mmrouter_sim.{engine}.flags").parse([*made.command[1:], *made.args])
    assert (settings.model, settings.served_names, settings.engine) == ("a/b", ("vl",), engine)
    assert (settings.block_size, settings.image_limit, settings.ranks, settings.max_seqs) == (32, 5, 2, 4)
    assert settings.processor == {"max_pixels": 100352}
    assert (settings.token_details, bool(settings.api_keys)) == (True, engine == "sglang")  # or in the environment
    assert (settings.events.publishes, settings.events.hwm, settings.events.binds) == (True, 10_000, False)
    assert settings.events.endpoint == "tcp://$(POD_LOOPBACK):5557"


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
    with pytest.raises(ValueError, match="HF_ENDPOINT names no mirror"):
        find_folder("org/name", "other")


def test_a_model_is_downloaded_from_a_mirror_once_and_without_weights(tmp_path, monkeypatch):
    files = {"config.json": b"{}", "merges.txt": b"x ", "model.safetensors": b"w", "onnx/config.json": b"{}"}
    hub = Hub(files, "org/name")
    threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}).start()
    try:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        folder = find_folder("org/name", None)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
            "config.json": b"{}",
            "merges.txt": b"x a",
        }
        asked = len(hub.asked)
        assert (find_folder("org/name", None), len(hub.asked)) == (folder, asked)
        assert hub_folder(tmp_path, "org/name", "main") == (folder, COMMIT), "the sidecar finds it"
        with pytest.raises(OSError, match="404"):
            find_folder("org/other", None)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(ValueError, match="neither a folder nor"):
            find_folder("org/other", None)
    finally:
        hub.shutdown()
        hub.server_close()


def test_a_chat_template_is_a_file_or_itself(tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    assert parse(["serve", "m", "--chat-template", str(file)]).chat_template == "{{ messages }}"
    assert parse(["serve", "m", "--chat-template", "{{ 1 }}"]).chat_template == "{{ 1 }}"
