"""The live page in a real browser: a running deployment, and a router with hostile names and a thousand workers."""

import asyncio
import json
import os
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from local.browser import Browser, browser
from local.rig import ROOT, Deployment
from unit.cli.test_bench_page import drawn
from unit.router.frontend import PORT, Frontend
from unit.router.rig import BLOCK

from mmrouter_cli.bench.html_report import page as bench_page
from mmrouter_lib.block_keys import block_keys
from mmrouter_lib.feed import LoadReport
from mmrouter_router.api.live_view import DECISION_ROWS

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
WORKERS = 1000
MAX_ELEMENTS = 3000
"""In the document, with any number of workers and decisions."""
MAX_CHANGES = 1500
"""Changes of the document that one task may make: with them, a task is short on any machine."""
LIST_ROWS = 40
SYSTEM = "You are a patient guide for visitors of a harbour town, and you answer in two or three plain sentences. "
QUESTIONS = (
    "Which ship in the harbour is the oldest one?",
    "How do I get from the station to the lighthouse?",
    "What can children do on a rainy afternoon?",
    "Where is the fish market, and when does it open?",
)
COUNT_CHANGES = """
window.most = 0;
new MutationObserver((records) => { window.most = Math.max(window.most, records.length); })
  .observe(document.body, {subtree: true, childList: true, characterData: true, attributes: true});
"""
IN_FLIGHT = "[...document.querySelectorAll('#workers-table tbody td:nth-child(3)')]"
FOCUSED = """
(() => { const it = document.activeElement;
  return it === document.body ? '' : it.id || it.getAttribute('aria-label') || it.value || it.textContent; })()
"""
WORKER_LINES = """
(() => { const row = document.querySelector('#decisions-table tbody tr'), range = document.createRange();
  row.querySelector('.why').textContent = 'a reason '.repeat(60);
  range.selectNodeContents(row.querySelector('.worker'));
  return range.getClientRects().length; })()
"""
CONTROLS = """
[...document.querySelectorAll('button, input, a[href], [tabindex="0"]')]
  .filter((it) => it.checkVisibility() && !it.disabled && !(it.type === 'radio' && !it.checked))
  .map((it) => it.id || it.getAttribute('aria-label') || it.value || it.textContent)
"""


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[Browser]:
    async with browser(tmp_path) as opened:
        await opened.size(1280, 900)
        await opened.colours("light")
        yield opened


@pytest.fixture
async def crowded() -> AsyncIterator[Frontend]:
    """A router with a thousand workers, the first of which has a hostile name, as have deployment and model."""
    frontend = Frontend(token=f"right&{HOSTILE}", deployment=HOSTILE, model=HOSTILE)
    for number in range(WORKERS):
        frontend.worker(f"worker-{number:03d}" if number else HOSTILE)
    await frontend.start()
    yield frontend
    await frontend.stop()


def address(frontend: Frontend) -> str:
    from mmrouter_cli.status.live_pages import address

    return address(f"http://{frontend.ip}:{PORT}", frontend.token)


def talk(demo: Deployment, turns: int = 3) -> list[str]:
    """Let four conversations grow at the first frontend; return their request ids."""
    import openai

    url = demo.run["frontends"][0]["url"]
    ids = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", timeout=120) as client:
        for question in QUESTIONS:
            messages: list[Any] = [{"role": "system", "content": f"Visitors ask: {question} {SYSTEM * 4}"}]
            for turn in range(turns):
                messages.append({"role": "user", "content": f"{question} Please explain it for day {turn}. " * 3})
                raw = client.chat.completions.with_raw_response.create(model="demo", messages=messages, max_tokens=24)
                ids.append(raw.headers["x-mmrouter-request-id"])
                messages.append({"role": "assistant", "content": raw.parse().choices[0].message.content})
    return ids


async def test_a_running_deployment_is_shown_and_a_click_explains(
    page: Browser, settled: Deployment, tmp_path: Path
) -> None:
    ids = await asyncio.to_thread(talk, settled)
    done = await asyncio.to_thread(settled.mmrouter, "ui", settled.url, "--json")
    pages = json.loads(done.stdout)
    assert [urls["address"].split("/ui/")[0] for urls in pages] == settled.controls, done.stderr
    await page.open(pages[0]["address"])
    last = f"document.querySelector('[title=\"{ids[-1]}\"]')"
    await page.until(last)
    assert await page.value("document.querySelector('#deployment').textContent") == "demo"
    assert await page.value("document.querySelector('#workers-value').textContent") == "3 of 3"
    await page.until("document.querySelector('#against-value').textContent.startsWith('+')")
    await page.until("document.querySelectorAll('#map-scroller tbody tr').length >= 4")
    assert await page.value("document.querySelectorAll('#workers-table tbody tr').length") == 3

    await page.click(last)
    await page.until("document.querySelector('#explanation-body table')")
    decision = settled.ask(f"/control/decisions/{ids[-1]}")
    shown = await page.value("document.querySelector('#explanation').innerText")
    assert decision["why"] in shown
    for candidate in decision["candidates"]:
        assert candidate["worker"] in shown
    await page.press("Escape")
    assert not await page.value("document.querySelector('#explanation').open")

    (fresh,) = (await asyncio.to_thread(talk, settled, 1))[-1:]
    await page.until(f"document.querySelector('[title=\"{fresh}\"]')")
    assert await page.value("location.href") == pages[0]["address"].split("#")[0]
    assert not [url for url in page.requests if settled.token in url.split("#")[0]]
    assert not [line for line in settled.log if settled.token in line]
    assert page.console == []
    await pictures(page, tmp_path)
    assert await page.value(WORKER_LINES) == 1


async def pictures(page: Browser, folder: Path) -> None:
    """Take the page in both colour schemes, wide and narrow; with MMROUTER_PICTURE, the README's as well."""
    folder = Path(os.environ.get("MMROUTER_PICTURES", folder))
    backgrounds = set()
    for scheme in ("light", "dark"):
        await page.colours(scheme)
        backgrounds.add(await page.value("getComputedStyle(document.body).backgroundColor"))
        for width in (1280, 400):
            await page.size(width, 900)
            await page.value("scrollTo(0, 0)")
            await page.picture(folder / f"{scheme}-{width}.png", whole=True)
            assert await page.value("document.documentElement.scrollWidth") <= width
    assert len(backgrounds) == 2
    await page.size(1280, 900)
    for chosen in ("light", "dark"):  # against what the system prefers
        await page.colours({"light": "dark", "dark": "light"}[chosen])
        await page.value(f"document.querySelector('[name=theme][value={chosen}]').click()")
        background = await page.value("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background.removeprefix("rgb(").removesuffix(")").split(","))) > 384) == (
            chosen == "light"
        )
    await page.value("document.querySelector('[name=theme][value=auto]').click()")
    await page.colours("light")
    await page.click("document.querySelector('#decisions-table tbody button')")
    await page.until("document.querySelector('#explanation-body table')")
    await page.picture(folder / "explanation.png")
    await page.press("Escape")
    await page.value("document.activeElement.blur()")
    if picture := os.environ.get("MMROUTER_PICTURE"):
        await page.size(1280, 800)
        await page.value("scrollTo(0, 0)")
        await page.picture(ROOT / picture)


async def test_hostile_names_are_text(page: Browser, crowded: Frontend) -> None:
    hostile = next(iter(crowded.fleet))
    keys = crowded.decide("<b>first</b>").keys
    crowded.delta(hostile, keys)
    trace = crowded.decide("<b>last</b>")
    assert trace.decision.target.worker is hostile
    trace.add_attempt(trace.decision, HOSTILE)
    trace.add_attempt(trace.decision, HOSTILE)
    trace.decision.reasons = (f"media:{HOSTILE}",)
    trace.decision.exactness = "partial"
    await page.open(address(crowded))
    await page.until("document.querySelectorAll('#decisions-table tbody tr').length === 2")
    await page.until("document.querySelectorAll('#map-scroller tbody tr').length")
    for place in ("#deployment", "#about", "#decisions-table", "#map-scroller", "#status-command"):
        assert HOSTILE in await page.value(f"document.querySelector('{place}').textContent"), place
    await page.click("document.querySelector('#decisions-table tbody button')")
    await page.until("document.querySelector('#explanation-body table')")
    shown = await page.value("document.querySelector('#explanation').textContent")
    assert shown.count(HOSTILE) >= 4
    assert "<b>last</b>" in shown
    assert await page.value("document.querySelectorAll('img, b, main script, dialog script').length") == 0
    assert not (await page.value("document.title")).startswith("owned")
    assert page.console == []
    # Even a mistake in the page's scripts could not turn text into elements.
    with pytest.raises(AssertionError, match="TrustedHTML"):
        await page.value("document.body.innerHTML = '<b>x</b>'")


async def test_the_page_shows_the_operators_conditions_and_steps_as_text(page: Browser, crowded: Frontend) -> None:
    await page.open(address(crowded))
    await page.until("document.querySelector('#resource-absent').checkVisibility()")
    condition = {"type": "Progressing", "status": "True", "reason": "RollingOut", "message": HOSTILE}
    conditions = [
        {**condition, "lastTransitionTime": HOSTILE},
        {**condition, "type": HOSTILE, "status": "False", "lastTransitionTime": "2026-01-02T03:04:05Z"},
    ]
    pool = {"name": HOSTILE, "desired": 2, "updated": 1, "ready": 2, "verified": 0}
    steps = [{"action": "hold", "kind": "Deployment", "name": HOSTILE, "why": HOSTILE}]
    sent = {"phase": HOSTILE, "frontend": {"desired": 1}, "pools": [pool], "conditions": conditions, "steps": steps}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as operator:
        url, headers = (
            f"http://{crowded.ip}:{PORT}/control/status",
            {"authorization": f"Bearer {crowded.token}".encode()},
        )
        assert (await operator.put(url, json=sent, headers=headers)).status_code == 204
        await page.until("document.querySelectorAll('#conditions tbody tr').length === 2")
        rows = "[...document.querySelectorAll('#conditions tbody tr')]"
        first, second = await page.value(f"{rows}.map((row) => [...row.cells].map((it) => it.textContent))")
        assert first == ["Progressing", "True", "RollingOut", HOSTILE, HOSTILE]
        assert second[:4] == [HOSTILE, "False", "RollingOut", HOSTILE]
        assert second[4].startswith("2026-01-0")
        assert await page.value("document.querySelector('#resource-step').textContent") == HOSTILE
        assert HOSTILE in await page.value("document.querySelector('#resource-phase').textContent")
        assert (
            await page.value("document.querySelector('#steps').textContent") == f"hold Deployment {HOSTILE}: {HOSTILE}"
        )
        replicas = await page.value("document.querySelector('#replicas tbody').innerText")
        assert "1 of 2\t2 of 2\t0 of 2" in replicas
        assert "0 of 1\t0 of 1\t\N{EN DASH}" in replicas
        assert not await page.value("document.querySelector('#resource-absent').checkVisibility()")

        settled = {**sent, "conditions": [{**conditions[0], "message": ""}], "steps": []}
        assert (await operator.put(url, json=settled, headers=headers)).status_code == 204
        await page.until("document.querySelectorAll('#conditions tbody tr').length === 1")
    assert not await page.value("document.querySelector('#steps').checkVisibility()")
    assert await page.value("document.querySelectorAll('img, main script').length") == 0
    message = "document.querySelector('#conditions td[data-name=Message]').checkVisibility()"
    assert await page.value(message)
    await page.size(400, 800)
    assert await page.value("document.documentElement.scrollWidth") == 400
    assert not await page.value(message)  # there a cell without text would be a label alone
    assert page.console == []


async def test_a_thousand_workers_and_a_burst_of_decisions_change_little_at_a_time(
    page: Browser, crowded: Frontend
) -> None:
    await page.open(address(crowded))
    await page.until(f"document.querySelector('#workers-shown').textContent.includes('of {WORKERS:,} workers')")
    await page.value(COUNT_CHANGES)
    for burst in range(3):
        for number, worker in enumerate(crowded.fleet):
            crowded.fleet.on_published(worker, LoadReport(0, 0.0, 1000 + burst * WORKERS + number, 0.5))
        for number in range(200):
            ids = array("I", range(burst * 10_000 + number, burst * 10_000 + number + BLOCK * 3))
            crowded.delta(
                crowded.decide(f"burst-{burst}-{number}", ids=ids).decision.target.worker, block_keys(ids, BLOCK, (), 5)
            )
        await page.until(f"document.querySelector('[title=\"burst-{burst}-199\"]')")
        await page.until(f"{IN_FLIGHT}.every((it) => it.textContent !== '0')")
    assert await page.value("document.querySelectorAll('#decisions-table tbody tr').length") == LIST_ROWS
    assert "the newest of 600" in await page.value("document.querySelector('#decisions-note').textContent")
    assert await page.value("document.querySelectorAll('*').length") <= MAX_ELEMENTS
    assert 0 < await page.value("window.most") <= MAX_CHANGES
    assert DECISION_ROWS < LIST_ROWS

    await page.value("document.querySelector('#filter').focus()")
    await page.call("Input.insertText", text="worker-99")
    await page.until("document.querySelectorAll('#workers-table tbody tr').length === 10")
    await page.value("document.querySelector('#filter').select()")
    await page.call("Input.insertText", text="worker-")
    await page.until("document.querySelectorAll('#workers-table tbody tr').length === 25")
    first = await page.value("document.querySelector('#workers-table tbody td').textContent")
    await page.click("document.querySelector('#next')")
    await page.until(f"document.querySelector('#workers-table tbody td').textContent !== {json.dumps(first)}")
    assert page.console == []


async def test_a_narrow_screen_never_scrolls_sideways(page: Browser, crowded: Frontend) -> None:
    crowded.decide("narrow")
    await page.size(400, 800)
    await page.open(address(crowded))
    await page.until("document.querySelectorAll('#decisions-table tbody tr').length")
    await page.until("document.querySelectorAll('#map-scroller tbody tr').length")
    await page.until("document.querySelectorAll('#workers-table tbody tr').length === 25")
    assert await page.value("document.documentElement.scrollWidth") == 400
    await page.click("document.querySelector('#decisions-table tbody button')")
    await page.until("document.querySelector('#explanation-body table')")
    assert await page.value("document.documentElement.scrollWidth") == 400
    assert await page.value("document.querySelector('#explanation').getBoundingClientRect().width") <= 400


async def test_the_page_of_a_benchmark_fits_a_narrow_screen_and_is_dark_where_the_system_is(
    page: Browser, tmp_path: Path
) -> None:
    both = [drawn(1, policy="roundRobin"), drawn(2, policy="kv", salt="t")]
    (tmp_path / "bench.html").write_text(bench_page(both))
    await page.size(420, 800)
    await page.call("Page.navigate", url=(tmp_path / "bench.html").as_uri())
    await page.until("document.querySelectorAll('.tile').length === 5 && document.readyState === 'complete'")
    assert await page.value("document.documentElement.scrollWidth") == 420
    texts = set()
    for scheme in ("light", "dark"):
        await page.colours(scheme)
        texts.add(await page.value("getComputedStyle(document.querySelector('svg text')).fill"))
    assert len(texts) == 2


async def test_the_keyboard_reaches_every_control(page: Browser, crowded: Frontend) -> None:
    crowded.decide("by-key")
    await page.open(address(crowded))
    await page.until("document.querySelectorAll('#decisions-table tbody tr').length")
    await page.until("document.querySelectorAll('#map-scroller tbody tr').length")
    await page.until("document.querySelectorAll('#workers-table tbody tr').length === 25")
    expected, reached = set(await page.value(CONTROLS)), set()
    for _ in range(3 * len(expected)):
        await page.press("Tab")
        reached.add(await page.value(FOCUSED))
        if expected <= reached:
            break
    assert expected - reached == set()

    await page.value("document.querySelector('#decisions-table tbody button').focus()")
    await page.press("Enter")
    await page.until("document.querySelector('#explanation').open")
    await page.until("document.querySelector('#explanation-body table')")
    await page.press("Escape")
    await page.until("!document.querySelector('#explanation').open")
    assert await page.value(FOCUSED) == "Explain request by-key"
    await page.value("document.querySelector('[name=theme]:checked').focus()")
    await page.press("ArrowRight")
    assert await page.value("document.documentElement.dataset.theme") == "light"


async def test_without_a_token_the_page_shows_a_form_and_a_wrong_one_is_refused(
    page: Browser, crowded: Frontend
) -> None:
    crowded.decide("secret")
    await page.open(f"http://{crowded.ip}:{PORT}/ui/")
    await page.until("document.activeElement?.id === 'token'")
    assert "secret" not in await page.value("document.body.textContent")
    for given in ("wrong", crowded.token):
        await page.value("document.querySelector('#token').focus()")
        await page.call("Input.insertText", text=given)
        await page.press("Enter")
        if given == "wrong":
            await page.until("document.querySelector('#sign-in-why').textContent.includes('rejects this token')")
    await page.until("document.querySelector('[title=secret]')")
    assert await page.value("document.querySelector('#sign-in').hidden")


async def test_a_lost_connection_is_shown_and_taken_up_again(page: Browser, crowded: Frontend) -> None:
    crowded.decide("before")
    await page.open(address(crowded))
    await page.until("document.querySelector('[title=before]')")
    await crowded.stop()
    await page.until("document.querySelector('#connection').dataset.state === 'lost'")
    again = Frontend(token=crowded.token, ip=crowded.ip)
    again.worker("restarted")
    again.decide("after")
    await again.start()
    try:
        await page.until("document.querySelector('[title=after]')")
        assert await page.value("document.querySelector('#connection').dataset.state") == "live"
        await page.until("document.querySelectorAll('#workers-table tbody tr').length === 1")
        assert not await page.value("document.querySelector('[title=before]')")
    finally:
        await again.stop()
