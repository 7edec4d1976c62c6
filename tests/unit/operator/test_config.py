"""The operator's own file: absent it gives defaults, malformed it names the field."""

from pathlib import Path

import pytest

from mmrouter_operator.model.config import ConfigError, OperatorConfig, load_config


def test_without_a_file_everything_has_its_default() -> None:
    assert load_config(None) == OperatorConfig()


def test_a_file_is_read_in_camel_case(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("prometheusAddress: http://prometheus:9090\npodCidrs: [10.244.0.0/16, 'fd00:0::/8']\n")
    config = load_config(path)
    assert config.prometheus_address == "http://prometheus:9090"
    assert config.pod_cidrs == ("10.244.0.0/16", "fd00::/8")


def test_an_empty_file_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("")
    assert load_config(path) == OperatorConfig()


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
