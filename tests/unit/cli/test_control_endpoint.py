"""Where a command finds a deployment's control API."""

from pathlib import Path

import pytest

from mmrouter_cli.status.control_endpoint import ControlEndpoint, UnreachableError, find_control

URL = "http://demo"


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the configuration in a frontend's pod."""
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "control.token").write_text("secret\n")
    monkeypatch.setenv("MMROUTER_CONFIG", str(tmp_path))
    monkeypatch.setenv("POD_IP", "10.1.2.3")
    monkeypatch.delenv("MMROUTER_CONTROL_TOKEN", raising=False)
    return tmp_path


@pytest.mark.parametrize(("ip", "host"), [("10.1.2.3", "10.1.2.3"), ("fd00::7", "[fd00::7]")])
def test_in_a_frontends_pod_its_own_control_port_is_taken(
    pod: Path, monkeypatch: pytest.MonkeyPatch, ip: str, host: str
) -> None:
    monkeypatch.setenv("POD_IP", ip)
    assert find_control(f"{URL}/v1", None, None) == ControlEndpoint(URL, (f"http://{host}:8001",), "secret")


def test_what_is_named_counts_more_than_the_own_pod(pod: Path) -> None:
    assert find_control(URL, "http://10.9.9.9:8001/", "other") == ControlEndpoint(
        URL, ("http://10.9.9.9:8001",), "other"
    )


def test_elsewhere_the_error_says_what_to_give(pod: Path) -> None:
    (pod / "secrets" / "control.token").unlink()
    with pytest.raises(UnreachableError, match="--control and --token"):
        find_control(URL, None, None)
    with pytest.raises(UnreachableError, match="--control needs --token too"):
        find_control(URL, "http://10.9.9.9:8001", None)


def test_elsewhere_the_error_names_what_runs_on_this_machine(
    pod: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pod / "secrets" / "control.token").unlink()
    monkeypatch.setattr("mmrouter_cli.status.control_endpoint.run_root", lambda: tmp_path / "runs")
    with pytest.raises(UnreachableError, match="none runs here"):
        find_control("127.1.0.1:8000", None, None)
    (tmp_path / "runs" / "ending").mkdir(parents=True)
    (tmp_path / "runs" / "ending" / "run.json").write_text("{")
    (tmp_path / "runs" / "demo").mkdir()
    (tmp_path / "runs" / "demo" / "run.json").write_text(
        '{"endpoint": "http://127.1.0.1:8000", "frontends": [], "control_token": "/nowhere"}'
    )
    with pytest.raises(UnreachableError, match=r"\(there is http://127\.1\.0\.1:8000\)"):
        find_control("127.1.0.1:8000", None, None)
