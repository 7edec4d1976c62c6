"""What ``up`` refuses before it starts anything."""

import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from mmrouter_cli.app import EXAMPLES, app
from mmrouter_cli.init import Answers, text
from mmrouter_cli.local import preflight
from mmrouter_cli.local.folders import LocalError
from mmrouter_cli.local.preflight import Preflight
from mmrouter_cli.local.run_plan import make_plan
from mmrouter_lib.api import parse_deployment
from mmrouter_operator.model.credentials import new_secret_data
from mmrouter_operator.render import render

CPU = {"kind": "cpu"}
FOLDER = {"hostPath": {"path": "model"}}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ENDPOINT", raising=False)


def checks(base_dir: Path, volume: dict[str, Any] | None = FOLDER, **more: Any) -> Preflight:
    resource = {
        "apiVersion": "mmrouter.io/v1alpha1",
        "kind": "MMRouterDeployment",
        "metadata": {"name": "t"},
        "spec": {
            "model": {"id": "m", **({} if volume is None else {"volume": volume})},
            "engine": {"type": "vllm"},
            "frontend": {"service": {"port": more.pop("service_port", 8000)}},
            "pools": [{"name": "worker", "role": "worker", "replicas": 3, "accelerator": more.pop("accelerator", CPU)}],
        },
    }
    deployment = parse_deployment(resource)
    plan = make_plan(render(deployment, secrets=new_secret_data()))
    options = {"plan": plan, "engines": "sim", "engine_env": None, "gateway": False, **more}
    return Preflight(deployment=deployment, base_dir=base_dir, **options)


def problems(preflight: Preflight) -> list[str]:
    with pytest.raises(LocalError) as refused:
        preflight.check()
    return str(refused.value).splitlines()


def model(base_dir: Path, *files: str) -> None:
    (base_dir / "model").mkdir()
    for name in files:
        (base_dir / "model" / name).write_text("{}")


def test_every_problem_is_in_one_message(tmp_path: Path) -> None:
    folder, command, port = problems(
        checks(tmp_path, engines="path", engine_env=tmp_path / "none", gateway=True, service_port=8080)
    )
    assert folder.startswith(f"spec.model.volume: there is no folder {tmp_path / 'model'}: correct hostPath.path")
    assert command == f"{tmp_path / 'none'} is not an environment: it has no folder bin"
    assert port == "Envoy needs port 8080, which a Service has: give that another port"


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ((), "config.json and no tokenizer, such as tokenizer.json"),
        (("tokenizer.json",), "config.json"),
        (("config.json",), "tokenizer, such as tokenizer.json"),
    ],
)
def test_a_model_folder_needs_configuration_and_tokenizer(tmp_path: Path, files: tuple[str, ...], missing: str) -> None:
    model(tmp_path, *files)
    named = f"spec.model.volume: {tmp_path / 'model'} has no {missing}: name the folder with the model's files"
    assert problems(checks(tmp_path)) == [named]


@pytest.mark.parametrize("tokenizer", ["tokenizer.json", "vocab.txt", "spiece.model", "tekken.json"])
def test_a_tokenizer_of_any_format_is_one(tmp_path: Path, tokenizer: str) -> None:
    model(tmp_path, "config.json", tokenizer)
    checks(tmp_path).check()


@pytest.mark.parametrize("name", ["demo.yaml", "demo-sglang.yaml"])
def test_the_examples_have_no_problem(name: str) -> None:
    deployment = parse_deployment(yaml.safe_load((EXAMPLES / name).read_text()))
    plan = make_plan(render(deployment, secrets=new_secret_data()))
    Preflight(deployment, plan, EXAMPLES, "sim", None, gateway=True).check()


def test_a_claim_is_refused_with_what_to_write_instead(tmp_path: Path) -> None:
    (line,) = problems(checks(tmp_path, {"persistentVolumeClaim": {"claimName": "weights"}}))
    assert "a persistentVolumeClaim is in clusters only: write `volume: {hostPath: " in line


def test_simulated_engines_need_a_folder_or_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = problems(checks(tmp_path, None))
    assert line.startswith("spec.model.volume is missing, and simulated engines need")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    checks(tmp_path, None).check()


def test_a_command_that_is_not_on_the_path_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model(tmp_path, "config.json", "tokenizer.json")
    monkeypatch.setenv("PATH", str(tmp_path))
    hint = "there is no command vllm on PATH; name the environment that has it with --engine-env"
    assert problems(checks(tmp_path, engines="path")) == [hint]
    (tmp_path / "vllm").touch(mode=0o755)
    checks(tmp_path, engines="path").check()


def test_devices_that_the_machine_lacks_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model(tmp_path, "config.json", "tokenizer.json")
    (tmp_path / "vllm").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (line,) = problems(checks(tmp_path, engines="path", accelerator={"kind": "nvidia", "count": 2}))
    assert line.startswith("pool worker: each engine needs 2 devices of kind nvidia, and this machine has 0")


def test_a_port_that_another_process_has_on_all_addresses_is_named(tmp_path: Path, kit: Any) -> None:
    model(tmp_path, "config.json", "tokenizer.json")
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        (line,) = problems(checks(tmp_path, plan=make_plan([kit.deployment("web", kit.server(port=port))])))
    assert f"port {port} is taken by a process that listens on all addresses; stop it" in line


@pytest.mark.parametrize(("free", "warned"), [(3 * 2**30, False), (3 * 2**30 - 1, True)])
def test_weights_that_exceed_the_free_memory_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, warned: bool
) -> None:
    model(tmp_path, "config.json", "tokenizer.json")
    with (tmp_path / "model" / "model.safetensors").open("wb") as file:
        file.truncate(2**30)
    monkeypatch.setattr(preflight, "available_memory", lambda: free)
    warning = checks(tmp_path, engines="path").warning()
    assert warning.startswith("3 engines load 1.0 GiB of weights each") == warned
    assert checks(tmp_path).warning() == ""


def test_the_free_memory_is_in_bytes() -> None:
    found = preflight.available_memory()
    assert found is not None
    assert 0.01 < found / psutil.virtual_memory().available < 100


def test_the_file_that_init_writes_is_refused_before_anything_starts(tmp_path: Path, root: Path) -> None:
    file = tmp_path / "mmrouter.yaml"
    file.write_text(text(Answers()))
    result = CliRunner().invoke(app, ["up", str(file)], catch_exceptions=False)
    assert result.exit_code == 2
    assert result.stderr.startswith("mmrouter: spec.model.volume is missing")
    assert not list(root.iterdir())
