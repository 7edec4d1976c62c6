"""The process around the loop: configuration, options, logs and metrics, and that docs/operator.md has them all."""

import json
import logging
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from mmrouter_operator import __main__ as entry
from mmrouter_operator.__main__ import JsonFormatter, TextFormatter
from mmrouter_operator.cluster.custom_resource_watch import kopf_settings
from mmrouter_operator.cluster.operator_kinds import CORE_CHILDREN, KINDS
from mmrouter_operator.metrics import Metrics
from mmrouter_operator.model.config import ConfigError, OperatorConfig, load_config
from mmrouter_operator.model.kinds import Capabilities
from mmrouter_operator.runtime.operator import watched_kinds


def test_a_file_is_read_in_camel_case_and_what_is_not_in_it_has_its_default(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("prometheusAddress: http://prometheus:9090\npodCidrs: [10.244.0.0/16, 'fd00:0::/8']\n")
    expected = OperatorConfig(prometheus_address="http://prometheus:9090", pod_cidrs=("10.244.0.0/16", "fd00::/8"))
    assert load_config(path) == expected
    path.write_text("")
    assert load_config(path) == load_config(None) == OperatorConfig()


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("podCidrs: [10.244.0.0]\napiServerCidrs: [host]", "apiServerCidrs.0"),
        ("podCidrs: [10.244.0.1/16]", "podCidrs.0"),
        ("prometheus: x", "prometheus"),
        ("image: 1", "image"),
        ("[", "is not YAML"),
    ],
)
def test_a_malformed_file_is_an_error_that_names_the_field(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=field):
        load_config(path)


DOCS = (Path(__file__).resolve().parents[3] / "docs" / "operator.md").read_text()


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """The process sets up logging for good; the tests after it want theirs back."""
    loggers = [logging.getLogger(name) for name in (None, "kopf", "asyncio")]
    before = [(list(one.handlers), one.level) for one in loggers]
    yield
    for one, (handlers, level) in zip(loggers, before, strict=True):
        one.handlers[:] = handlers
        one.setLevel(level)


def record(message: str = "m", **fields: str) -> logging.LogRecord:
    made = logging.LogRecord("l", logging.WARNING, "f", 1, message, None, None)
    made.__dict__.update(fields)
    return made


def test_a_log_line_is_json_on_one_line_with_the_objects_key() -> None:
    text = JsonFormatter().format(record("put\nright", namespace="n", object="d", child=""))
    assert "\n" not in text
    del (line := json.loads(text))["time"]
    about = {"namespace": "n", "object": "d"}
    assert line == {"level": "warning", "logger": "l", "message": "put\nright", **about}
    assert TextFormatter().format(record(object="d")).endswith("m object=d")


def test_the_conditions_that_are_shown_are_those_of_now() -> None:
    metrics = Metrics()

    def shown() -> set[str]:
        text = generate_latest(metrics.registry).decode()
        return {line for line in text.splitlines() if line.startswith("mmrouter_operator_condition{")}

    metrics.conditions(("n", "d"), [("Ready", "False"), ("Degraded", "True")])
    metrics.conditions(("n", "d"), [("Ready", "True"), ("Degraded", "True")])
    assert len(shown()) == 2
    assert not [line for line in shown() if 'status="False"' in line]
    metrics.conditions(("n", "e"), [("Ready", "True")])
    metrics.conditions(("n", "d"), ())
    assert len(shown()) == 1
    metrics.forget_all()
    assert not shown()


def test_the_gates_that_are_shown_are_those_of_deployments_that_exist() -> None:
    metrics = Metrics()

    def shown(name: str) -> float | None:
        labels = {"namespace": "n", "name": name, "gate": "verified"}
        return metrics.registry.get_sample_value("mmrouter_operator_closed_gates", labels)

    metrics.closed_gates(("n", "d"), {"verified": 2, "routable": 0})
    metrics.closed_gates(("n", "e"), {"verified": 1, "routable": 0})
    metrics.closed_gates(("n", "d"), {"verified": 0, "routable": 0})
    assert (shown("d"), shown("e")) == (0, 1)
    metrics.forget(("n", "d"))
    assert (shown("d"), shown("e")) == (None, 1)
    metrics.forget_all()
    assert shown("e") is None


def test_every_metric_is_documented_with_its_labels_and_no_other() -> None:
    metrics = Metrics()
    metrics.applies.labels("Service", "applied").inc()
    families = {}
    for family in metrics.registry.collect():
        suffix = "_total" if family.type == "counter" else ""
        families[family.name + suffix] = family
    rows = dict(re.findall(r"^\| `(mmrouter_operator_\w+)` \|([^|]*)\|", DOCS, re.MULTILINE))
    assert rows.keys() == families.keys()
    for name, labels in rows.items():
        used = {label for sample in families[name].samples for label in sample.labels} - {"le"}
        assert used <= set(re.findall(r"`(\w+)`", labels)), name


def test_every_option_is_documented_and_no_other() -> None:
    options = {
        option for action in entry.parser()._actions for option in action.option_strings if option.startswith("--")
    }
    section = DOCS[DOCS.index("## Options") :]
    assert set(re.findall(r"`(--[a-z-]+)`", section)) == options - {"--help"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--lease-duration=10", "--renew-deadline=10"],
        ["--bind=nowhere"],
        ["--config=/does/not/exist"],
        ["--kubeconfig=/does/not/exist"],
    ],
)
def test_options_that_cannot_be_are_refused_with_a_sentence(
    arguments: list[str], capsys: pytest.CaptureFixture[str], logging_as_before: None
) -> None:
    assert entry.main(arguments) == entry.USAGE
    assert capsys.readouterr().err.startswith("mmrouter operator: ")


def test_an_option_may_come_from_the_environment_and_the_command_line_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMROUTER_OPERATOR_LEASE_NAME", "env")
    monkeypatch.setenv("MMROUTER_OPERATOR_NAMESPACE", "a,b")
    monkeypatch.setenv("MMROUTER_OPERATOR_LEASE_DURATION", "30")
    given = entry.parser().parse_args([])
    assert (given.lease_name, given.namespace, given.lease_duration) == ("env", ["a,b"], 30.0)
    assert entry.parser().parse_args(["--lease-name=line"]).lease_name == "line"


def test_kopf_only_watches_and_never_gives_up() -> None:
    settings = kopf_settings()
    assert not settings.posting.enabled
    assert settings.peering.standalone
    assert settings.scanning.disabled
    pauses = list(islice(settings.networking.error_backoffs, 1000))  # type: ignore[arg-type]
    assert len(pauses) == 1000
    assert max(pauses) <= 10


def test_every_child_kind_is_watched() -> None:
    assert set(watched_kinds(Capabilities())) == {"Pod", *CORE_CHILDREN}
    assert set(watched_kinds(Capabilities(frozenset({"keda.sh/v1alpha1"})))) == {"Pod", "ScaledObject", *CORE_CHILDREN}
    assert KINDS["Deployment"].path("n", "d", "status") == "/apis/apps/v1/namespaces/n/deployments/d/status"
    assert KINDS["Secret"].path() == "/api/v1/secrets"
    assert KINDS["RuntimeClass"].path("n", "r") == "/apis/node.k8s.io/v1/runtimeclasses/r"
