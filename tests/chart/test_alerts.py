"""The alert rules: what they query exists, each has a runbook, and promtool sees each fire for its fault and no other.

A running deployment raises them in ``tests/local/test_alerts.py``.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart.helm import CHART, PROMETHEUS, ROOT, Helm
from chart.series import assert_exposed, grouped

FILE = CHART / "files" / "alerts.yaml"
GROUPS = yaml.safe_load(FILE.read_text())["groups"]
RULES = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
PAGE = (ROOT / "docs" / "alerts.md").read_text()
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="not run: no promtool")


def promtool(*arguments: str | Path) -> str:
    """Run promtool and return its output. Raises ``AssertionError`` if it fails."""
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -- the file ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule["alert"])
def test_an_alert_queries_series_that_are_exposed_and_its_texts_use_labels_that_it_has(rule: dict[str, Any]) -> None:
    assert_exposed(rule["expr"])
    used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
    assert used <= grouped(rule["expr"])


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule["alert"])
def test_an_alert_has_its_section_and_its_row_on_the_runbook_page(rule: dict[str, Any]) -> None:
    name, texts = rule["alert"], rule["annotations"]
    assert set(texts) == {"summary", "description", "runbook_url"}
    assert texts["runbook_url"] == f"docs/alerts.md#{name.lower()}"
    (section,) = re.findall(rf"^## {name}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert re.findall(r"^\*\*(.*?)\*\*", section, re.MULTILINE) == [
        "Meaning.",
        "Effect.",
        "How to look.",
        "What to do.",
    ]
    minutes = rule["for"].removesuffix("m")
    row = f"| [{name}](#{name.lower()}) | {rule['labels']['severity']} | {minutes} min |"
    assert row in PAGE


def test_the_page_has_no_other_alert() -> None:
    assert re.findall(r"^## (MMRouter\w+)", PAGE, re.MULTILINE) == list(RULES)


def test_the_prometheus_rule_has_the_file_with_the_sites_address_before_the_runbooks(helm: Helm) -> None:
    values = {"metrics": {"prometheusRule": {"runbooks": "https://docs.example/", "labels": {"release": "p"}}}}
    made = helm.render(values, PROMETHEUS).one("PrometheusRule", "mmrouter")
    assert made["metadata"]["labels"]["release"] == "p"
    text = FILE.read_text().replace("runbook_url: docs/", "runbook_url: https://docs.example/docs/")
    assert made["spec"] == yaml.safe_load(text)


def test_a_prometheus_rule_is_there_where_it_is_served_or_demanded(helm: Helm) -> None:
    def rules(mode: str, *options: str) -> int:
        return len(helm.render({"metrics": {"prometheusRule": {"mode": mode}}}, *options).all("PrometheusRule"))

    assert (rules("Auto"), rules("Auto", PROMETHEUS)) == (0, 1)
    assert (rules("Enabled"), rules("Disabled", PROMETHEUS)) == (1, 0)


@needs_promtool
def test_promtool_accepts_the_file() -> None:
    assert f"{len(RULES)} rules found" in promtool("check", "rules", FILE)


# -- the rules -----------------------------------------------------------------------------------------------------

OF = 'namespace="n",mmrouter_deployment="d",pod="f"'
FALSE = f'mmrouter_parity_total{{{OF},result="False",cause="template"}}'
DEGRADED = f'mmrouter_workers{{{OF},standing="degraded"}}'
SILENT = f'mmrouter_unroutable_workers{{{OF},cause="not_heard"}}'
HITS = f'mmrouter_overlap_blocks_total{{{OF},worker="w"}}'
BLOCKS = f'mmrouter_prompt_blocks_total{{{OF},worker="w"}}'
TURNS = f"mmrouter_round_robin_blocks_total{{{OF}}}"
FULL = f'mmrouter_overload_refusals_total{{{OF},reason="queue_full"}}'
FILES = f'mmrouter_tls_refused{{{OF},files="certificate"}}'
REFUSED = f'mmrouter_engine_tls_total{{{OF},event="untrusted"}}'
GATE = 'mmrouter_operator_closed_gates{namespace="n",name="d",gate="verified"}'
ALIASES = 'mmrouter_gateway_config_refused{namespace="n",pod="g"}'
LISTED = 'mmrouter_gateway_discovery_synced{namespace="n",pod="g"}'
SOUND: Mapping[str, str] = {
    **dict.fromkeys((FALSE, DEGRADED, SILENT, FULL, FILES, REFUSED, GATE, ALIASES), "0x200"),
    LISTED: "1x200",
    f'mmrouter_parity_total{{{OF},result="True",cause=""}}': "0+1x200",
    f'mmrouter_workers{{{OF},standing="verified"}}': "3x200",
    f'mmrouter_unroutable_workers{{{OF},cause="engine_starting"}}': "1x200",
    f'mmrouter_overload_refusals_total{{{OF},reason="rate_limited"}}': "0+9x200",
    f'mmrouter_engine_tls_total{{{OF},event="loaded"}}': "1x200",
    HITS: "0+80x200",
    TURNS: "0+30x200",
    BLOCKS: "0+100x200",
}
"""A deployment without a fault, with an engine that loads weights and a tenant above its limit. One value a minute."""
STATE = "0x59 1x19 0x121"  # a gauge of a fault from minute 60 to 79


@dataclass(frozen=True)
class Fault:
    """What is wrong from minute 60 on. At the minutes ``quiet`` no alert fires, at ``firing`` only its own does."""

    series: Mapping[str, str]
    alert: str = ""
    quiet: tuple[int, ...] = ()
    firing: tuple[int, ...] = ()


FAULTS = {
    "none": Fault({}, quiet=(30, 120, 200)),
    "a comparison fails once": Fault({FALSE: "0x59 1x140"}, "MMRouterExactnessLost", (59, 60, 75), (62, 68)),
    "a worker is degraded": Fault({DEGRADED: STATE}, "MMRouterExactnessLost", (59, 60, 81), (62, 79)),
    "a sidecar is silent": Fault({SILENT: STATE}, "MMRouterFeedStale", (59, 64, 81), (66, 79)),
    "a sidecar restarts": Fault({SILENT: "0x59 1x2 0x138"}, quiet=(59, 62, 66, 70)),
    "hits fall below round robin": Fault(
        {HITS: "0+80x59 4740+20x140"}, "MMRouterHitRatioBelowRoundRobin", (59, 85, 100), (110, 200)
    ),
    "the same with few requests": Fault({HITS: "0+1x200", TURNS: "0+5x200", BLOCKS: "0+10x200"}, quiet=(59, 110, 200)),
    "queues are full": Fault({FULL: "0x59 5+5x20 105x119"}, "MMRouterQueueFull", (59, 61, 90), (63, 80)),
    "a certificate cannot be used": Fault({FILES: STATE}, "MMRouterCertificateStuck", (59, 64, 81), (66, 79)),
    "an engine is not trusted": Fault(
        {REFUSED: "0x59 1+1x19 20x120"}, "MMRouterEngineCertificateRefused", (59, 61, 90), (63, 79)
    ),
    "a gate stays closed": Fault({GATE: "0x59 1x29 0x110"}, "MMRouterGateStuck", (59, 74, 91), (76, 89)),
    "aliases cannot be used": Fault({ALIASES: STATE}, "MMRouterGatewayStale", (59, 64, 81), (66, 79)),
    "deployments are not listed": Fault({LISTED: "1x59 0x19 1x121"}, "MMRouterGatewayStale", (59, 64, 81), (66, 79)),
    "a gateway starts": Fault({LISTED: "1x59 0x2 1x138"}, quiet=(59, 62, 66, 70)),
    "a gate opens in time": Fault({GATE: "0x59 1x9 0x130"}, quiet=(59, 69, 76, 90)),
}


def test_every_alert_has_a_fault() -> None:
    assert {fault.alert for fault in FAULTS.values() if fault.alert} == set(RULES)


@needs_promtool
def test_each_fault_raises_its_alert_after_its_time_and_no_other(tmp_path: Path) -> None:
    def expected(minute: int, alert: str) -> dict[str, Any]:
        samples = [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert else []
        firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
        return {"expr": firing, "eval_time": f"{minute}m", "exp_samples": samples}

    tests = [
        {
            "name": name,
            "interval": "1m",
            "input_series": [
                {"series": series, "values": values} for series, values in {**SOUND, **fault.series}.items()
            ],
            "promql_expr_test": [
                *(expected(minute, "") for minute in fault.quiet),
                *(expected(minute, fault.alert) for minute in fault.firing),
            ],
        }
        for name, fault in FAULTS.items()
    ]
    file = tmp_path / "alerts.test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(FILE)], "evaluation_interval": "1m", "tests": tests}))
    assert "SUCCESS" in promtool("test", "rules", file)
