"""What is broken on purpose must be seen: a second router, in this process and broken, over the same engines."""

import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import signal
import socket
import threading
from contextlib import contextmanager

import httpx
import pytest
from waiting import wait_for

from mmrouter_cli.status.control_api import ControlEndpoint
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
        return [worker["standing"] for worker in self.control("state")["workers"]]

    def control(self, path):
        headers = {"authorization": f"Bearer {self.demo.token}"}
        return httpx.get(f"http://{self.ip}:8001/control/{path}", headers=headers, timeout=10).json()

    def ask(self, content):
        """Send a chat; return where its decision is found."""
        body = {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 2}
        answer = httpx.post(f"http://{self.ip}:8000/v1/chat/completions", json=body, timeout=30)
        assert answer.status_code == 200, answer.text
        return f"decisions/{answer.headers['x-mmrouter-request-id']}"

    def gate(self, client=httpx.Client):
        """Return the first check of the gate that fails, ``None`` without any."""
        reach = ControlEndpoint(f"http://{self.ip}:8000", (f"http://{self.ip}:8001",), self.demo.token)
        with client(timeout=60) as asking:
            checks = Verifier(reach, api_key=None, client=asking).run(rounds=1)
        return next((check for check in checks if not check.passed), None)

    def compare(self):
        """One canary's comparison against the first worker, outside of any claim."""
        worker = next(iter(self.router.fleet))
        feeder = self.router.feed(worker.member.uid)
        from mmrouter_router.fleet.workers import Target

        target = Target(worker, 0, self.router.placer.block_size(worker))
        future = asyncio.run_coroutine_threadsafe(self.router.canary.compare(target, feeder), self.loop)
        return future.result(30)[0]


@pytest.fixture
def second(demo):
    return Second(demo)


def test_an_unbroken_second_router_passes_gate_and_canary(second):
    with second.running():
        assert second.gate() is None
        assert second.compare() is None


def test_a_wrong_family_is_named_by_its_token_count(demo, model):
    for name, change in (
        ("config.json", lambda config: config["vision_config"].update(spatial_merge_size=1)),
        ("preprocessor_config.json", lambda options: options.update(merge_size=1)),
    ):
        content = json.loads((model / name).read_text())
        change(content)
        (model / name).write_text(json.dumps(content))
    second = Second(demo, model)
    with second.running():
        assert second.compare().cause == "count"
        assert "tokens" in second.gate().message


def test_a_wrong_template_is_named_by_canary_and_live_parity_and_the_client_notices_nothing(demo, other_template):
    def sample_everything(router):
        router.sampler = router.sampler.__class__(1.0, router.fleet, router.feed, router.metrics)

    second = Second(demo, other_template)
    with second.running(sample_everything):
        decision = second.ask(" ".join(["A lantern swings over the quiet harbour tonight."] * 8))
        found = wait_for(lambda: second.control(decision)["parity"], 20, "the sample was compared")
        assert (found["result"], found["cause"]) == ("False", "template"), found
        assert found["block"]["predicted"]["text"].startswith("Hello!")
        assert not found["block"]["published"]["text"].startswith("Hello!")
        metrics = httpx.get(f"http://{second.ip}:9090/metrics", timeout=10).text
        assert 'mmrouter_parity_total{cause="template",engine="vllm",family="qwen2_vl",result="False"}' in metrics
        assert second.compare().cause in ("template", "count")
        assert second.gate() is not None


def test_a_wrong_block_size_is_named(second):
    def break_it(router):
        router.placer.block_size = lambda worker: 32

    with second.running(break_it):
        found = second.compare()
        assert (found.cause, "16" in found.message) == ("block_size", True)
        assert "hit rate" in second.gate().message


def test_a_wrong_identity_is_named(second, monkeypatch):
    import mmrouter_router.api.chat
    import mmrouter_router.verify.probe_requests

    with second.running():
        for module in (mmrouter_router.api.chat, mmrouter_router.verify.probe_requests):
            monkeypatch.setattr(module, "to_wire", lambda identity: "m1-" + identity[::-1].hex())
        assert second.compare().cause == "identity"
        assert "hit rate" in second.gate().message


def test_an_image_that_is_taken_as_equal_fails_the_gate(second, monkeypatch):
    import mmrouter_router.request.images

    with second.running():
        monkeypatch.setattr(mmrouter_router.request.images, "media_identity", lambda data, options, key: bytes(32))
        failed = second.gate()
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
        assert "hit rate" in second.gate().message
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
        assert second.gate() is None
        assert lost


def test_a_sidecar_that_stood_still_is_not_taken_for_an_engine_that_publishes_nothing(demo, second, monkeypatch):
    import mmrouter_router.verify.canary

    monkeypatch.setattr(mmrouter_router.verify.canary, "EVENTS_SECONDS", 0.5)
    asked = []

    def break_it(router):
        send = router.probe_requests.send

        async def starved(target, request):
            asked.append(target.worker.member.name)
            sidecar.send_signal(signal.SIGSTOP if len(asked) == 1 else signal.SIGCONT)
            return await send(target, request)

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
        assert second.gate() is not None


def test_cached_tokens_that_are_absent_fail_the_gate(second):
    class Client(httpx.Client):
        def post(self, url, **options):
            answer = super().post(url, **options)
            if "/v1/chat" in str(url):
                body = answer.json()
                body["usage"].pop("prompt_tokens_details", None)
                answer._content = json.dumps(body).encode()
            return answer

    with second.running():
        assert "cached_tokens is absent" in second.gate(Client).message


def test_a_stale_feed_fails_the_gate(second):
    with second.running():
        # Whatever a sidecar says is lost from here on; that it is silent, the router has to notice by itself.
        second.router.fleet.on_published = second.router.fleet.on_reply = lambda worker, frame: []
        wait_for(lambda: second.standings() == ["unsynced"] * second.workers, 20, "the feeds are taken for lost")
        assert "unsynced" in second.gate().message
