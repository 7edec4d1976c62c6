"""The control port's app is made when it is first needed, so that other ports serve without its imports."""

import asyncio
import subprocess
import sys
import threading

import pytest

from mmrouter_router.api.lazy_app import LazyApp


async def test_requests_at_once_share_one_app_that_a_thread_makes() -> None:
    makers, served = list[threading.Thread](), list[str]()

    async def app(scope, receive, send) -> None:
        served.append(scope["path"])

    def make():
        makers.append(threading.current_thread())
        return app

    late = LazyApp(make)
    await asyncio.gather(*(late({"path": path}, None, None) for path in ("a", "b")))
    await late({"path": "c"}, None, None)
    assert sorted(served) == ["a", "b", "c"]
    assert len(makers) == 1
    assert makers[0] is not threading.main_thread()


async def test_after_a_failure_the_next_request_makes_the_app_again() -> None:
    failures = [OSError("too many open files")]

    async def app(scope, receive, send) -> None:
        pass

    def make():
        if failures:
            raise failures.pop()
        return app

    late = LazyApp(make)
    waiting = await asyncio.gather(*(late({}, None, None) for _ in range(2)), return_exceptions=True)
    assert [str(error) for error in waiting] == ["too many open files"] * 2
    await late({}, None, None)


@pytest.mark.parametrize("module", ["mmrouter_router.app", "mmrouter_router.gateway.app"])
def test_a_process_starts_without_the_control_ports_framework(module: str) -> None:
    code = f"import sys, {module}; print('fastapi' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout == "False\n"
