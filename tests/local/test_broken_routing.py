"""What is broken on purpose must be seen: a second router, in this process and broken, over the same engines."""

import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import signal
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from waiting import wait_for

from mmrouter_cli.status.control_endpoint import ControlEndpoint
from mmrouter_cli.verify import Verifier


def _free_ip():
    """A loopback address without a listener: ports are fixed, and a cancelled server's sockets may outlive it.

    It is this process's own: between looking and listening, another run of the tests may look, too.
    """
    for number in range(1, 255):
        ip = f"127.88.{os.getpid() % 250}.{number}"
        with contextlib.suppress(OSError):
            for port in (8000, 8001, 9090):
                with socket.create_server((ip, port)):
                    pass
            return ip
    pytest.fail("no loopback address of this process is free")


class Second:
    """A router of ours in a thread: same configuration, another address; ``router`` may be broken before it runs."""

    def __init__(self, demo, model_dir=None, workers=3) -> None:
        from mmrouter_router.app import Router
        from mmrouter_router.core.settings import load

        environment = next(iter(demo.processes("router").values())).environ()
        self.ip = _free_ip()
        settings = load({**environment, "POD_UID": f"second-{secrets.token_hex(4)}", "POD_IP": self.ip})
        if model_dir is not None:
            settings = dataclasses.replace(settings, model_dir=model_dir)
        self.demo, self.workers = demo, workers
        self._make = lambda: Router(settings)
        self._break = lambda router: None

    @contextmanager
    def running(self, break_it=lambda router: None):
        loop = asyncio.new_event_loop()
        began, failed = threading.Event(), []

        async def serve():
            self.router = self._make()
            break_it(self.router)
            self.task = asyncio.current_task()
            began.set()
            await self.router.run()

        def run():
            try:
                loop.run_until_complete(serve())
            except asyncio.CancelledError:
                pass
            except BaseException as error:
                failed.append(error)
                began.set()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert began.wait(60)
        assert not failed, failed
        self.loop = loop
        try:
            wait_for(self._settled, 60, "the second router knows its workers")
            yield self
        finally:
            loop.call_soon_threadsafe(self.task.cancel)
            thread.join(60)
            loop.close()

    def _settled(self):
        try:
            return self.standings() == ["verified"] * self.workers
        except httpx.TransportError:
            return False

    def standings(self):
        headers = {"authorization": f"Bearer {self.demo.token}"}
        state = httpx.get(f"http://{self.ip}:8001/control/state", headers=headers, timeout=5).json()
        return [worker["standing"] for worker in state["workers"]]

    def gate(self):
        reach = ControlEndpoint(f"http://{self.ip}:8000", (f"http://{self.ip}:8001",), self.demo.token)
        with httpx.Client(timeout=60) as client:
            return Verifier(reach, api_key=None, client=client).run(rounds=1)

    def compare(self):
        """One canary's comparison against the first worker, outside of any claim."""
        worker = next(iter(self.router.fleet))
        feeder = self.router.feed(worker.member.uid)
        size = self.router.placer.block_size(worker)
        future = asyncio.run_coroutine_threadsafe(self.router.canary.compare(worker, 0, feeder, size), self.loop)
        return future.result(30)[0]


def first_failure(checks):
    return next((check for check in checks if not check.passed), None)


@pytest.fixture
def second(demo):
    return Second(demo)


def test_an_unbroken_second_router_passes_gate_and_canary(second):
    with second.running():
        assert first_failure(second.gate()) is None
        assert second.compare() is None


def test_a_wrong_family_is_named_by_its_token_count(demo, tmp_path):
    folder = Path(next(iter(demo.processes("router").values())).environ()["MMROUTER_MODEL_DIR"])
    shutil.copytree(folder, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    config["vision_config"]["spatial_merge_size"] = 1
    preprocessor = tmp_path / "model" / "preprocessor_config.json"
    options = json.loads(preprocessor.read_text())
    options["merge_size"] = 1
    file.write_text(json.dumps(config))
    preprocessor.write_text(json.dumps(options))
    second = Second(demo, tmp_path / "model")
    with second.running():
        assert second.compare().cause == "count"
        assert "tokens" in first_failure(second.gate()).message


def test_a_wrong_template_is_named(demo, tmp_path):
    folder = Path(next(iter(demo.processes("router").values())).environ()["MMROUTER_MODEL_DIR"])
    shutil.copytree(folder, tmp_path / "model")
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text("Hello! " + template.read_text())
    second = Second(demo, tmp_path / "model")
    with second.running():
        assert second.compare().cause in ("template", "count")
        assert first_failure(second.gate()) is not None


def test_live_parity_names_a_difference_and_the_client_notices_nothing(demo, tmp_path):
    folder = Path(next(iter(demo.processes("router").values())).environ()["MMROUTER_MODEL_DIR"])
    shutil.copytree(folder, tmp_path / "model")
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text("Hello! " + template.read_text())

    def sample_everything(router):
        router.sampler = router.sampler.__class__(1.0, router.fleet, router.feed, router.metrics, seconds=3)

    second = Second(demo, tmp_path / "model")
    with second.running(sample_everything):
        text = " ".join(["A lantern swings over the quiet harbour tonight."] * 8)
        body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
        answer = httpx.post(f"http://{second.ip}:8000/v1/chat/completions", json=body, timeout=30)
        assert answer.status_code == 200
        request_id = answer.headers["x-mmrouter-request-id"]
        headers = {"authorization": f"Bearer {demo.token}"}
        url = f"http://{second.ip}:8001/control/decisions/{request_id}"

        def parity():
            return httpx.get(url, headers=headers, timeout=10).json()["parity"]

        wait_for(lambda: parity() is not None, 20, "the sample was compared")
        found = parity()
        assert (found["result"], found["cause"]) == ("False", "template"), found
        assert found["block"]["predicted"]["text"].startswith("Hello!")
        assert not found["block"]["published"]["text"].startswith("Hello!")
        metrics = httpx.get(f"http://{second.ip}:9090/metrics", timeout=10).text
        named = 'mmrouter_parity_total{cause="template",engine="vllm",family="qwen2_vl",result="False"}'
        assert named in metrics


def test_a_wrong_block_size_is_named(second):
    def break_it(router):
        router.placer.block_size = lambda worker: 32

    with second.running(break_it):
        found = second.compare()
        assert (found.cause, "16" in found.message) == ("block_size", True)
        assert "hit rate" in first_failure(second.gate()).message


def test_a_wrong_identity_is_named(second, monkeypatch):
    import mmrouter_router.api.chat
    import mmrouter_router.verify.probe_requests

    with second.running():
        for module in (mmrouter_router.api.chat, mmrouter_router.verify.probe_requests):
            monkeypatch.setattr(module, "to_wire", lambda identity: "m1-" + identity[::-1].hex())
        assert second.compare().cause == "identity"
        assert "hit rate" in first_failure(second.gate()).message


def test_an_image_that_is_taken_as_equal_fails_the_gate(second, monkeypatch):
    import mmrouter_router.request.prepare

    with second.running():
        monkeypatch.setattr(mmrouter_router.request.prepare, "media_identity", lambda data, options, key: bytes(32))
        failed = first_failure(second.gate())
        assert "a different image is treated as equal" in failed.message
        assert "another image misses" in failed.name


def test_an_unnoticed_lost_event_fails_verify(second):
    def break_it(router):
        apply = router.fleet._apply

        def forgetful(worker, delta):
            if not delta.stored:
                apply(worker, delta)

        router.fleet._apply = forgetful

    with second.running(break_it):
        assert "hit rate" in first_failure(second.gate()).message
        assert second.compare() is not None


def test_a_lost_delta_is_noticed_and_replayed(second):
    lost = []

    def break_it(router):
        published = router.fleet.on_published

        def lossy(worker, frame):
            if type(frame).__name__ == "Delta" and len(lost) < 5:
                lost.append(frame.seq)
                return []
            return published(worker, frame)

        router.fleet.on_published = lossy

    with second.running(break_it):
        assert first_failure(second.gate()) is None
        assert lost


def test_a_sidecar_that_stood_still_is_not_taken_for_an_engine_that_publishes_nothing(demo, second, monkeypatch):
    import mmrouter_router.verify.canary

    monkeypatch.setattr(mmrouter_router.verify.canary, "EVENTS_SECONDS", 0.5)
    asked = []

    def break_it(router):
        send = router.probe_requests.send

        async def starved(worker, rank, question):
            asked.append(worker.member.name)
            sidecar.send_signal(signal.SIGSTOP if len(asked) == 1 else signal.SIGCONT)
            return await send(worker, rank, question)

        router.probe_requests.send = starved

    with second.running(break_it):
        assert not asked
        sidecar = demo.processes("sidecar")[next(iter(second.router.fleet)).member.name]
        try:
            assert second.compare() is None
        finally:
            sidecar.send_signal(signal.SIGCONT)
    assert len(asked) > 2, "it received another request"


def test_policy_round_robin_fails_the_gate(second):
    def break_it(router):
        router.placer._policy = "roundRobin"

    with second.running(break_it):
        assert first_failure(second.gate()) is not None


def test_cached_tokens_that_are_absent_fail_the_gate(second, monkeypatch):
    class Client(httpx.Client):
        def post(self, url, **options):
            answer = super().post(url, **options)
            if "/v1/chat" in str(url):
                body = answer.json()
                body["usage"].pop("prompt_tokens_details", None)
                answer._content = json.dumps(body).encode()
            return answer

    with second.running():
        reach = ControlEndpoint(f"http://{second.ip}:8000", (f"http://{second.ip}:8001",), second.demo.token)
        with Client(timeout=60) as client:
            checks = Verifier(reach, api_key=None, client=client).run(rounds=1)
        assert "cached_tokens is absent" in first_failure(checks).message


def test_a_stale_feed_fails_the_gate(second):
    with second.running():
        # Whatever a sidecar says is lost from here on; that it is silent, the router has to notice by itself.
        second.router.fleet.on_published = second.router.fleet.on_reply = lambda worker, frame: []
        wait_for(lambda: second.standings() == ["unsynced"] * second.workers, 20, "the feeds are taken for lost")
        failed = first_failure(second.gate())
        assert failed is not None
        assert "unsynced" in failed.message
