"""The recipes of CONTRIBUTING work: each is performed on a copy of the sources, with the files that it names."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hack.build_once import ROOT

Copy = Callable[[str], Path]


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """Copies a top-level folder of the sources; :func:`run` imports the copies."""

    def make(name: str) -> Path:
        ignored = shutil.ignore_patterns("__pycache__")
        return Path(shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored))

    return make


def run(folder: Path, code: str) -> str:
    """Run code with the copies in a folder; return its output. Raises ``AssertionError`` when it fails."""
    copies = [str(path) for path in folder.iterdir() if path.is_dir()]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(copies), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def insert(file: Path, before: str, text: str) -> None:
    """Insert text before the first occurrence of another."""
    content = file.read_text()
    assert before in content
    file.write_text(content.replace(before, text + before, 1))


def test_an_owned_flag_is_one_entry(copy: Copy, tmp_path: Path) -> None:
    traits = copy("mmrouter") / "mmrouter_lib" / "api" / "engine_traits.py"
    insert(traits, "    *owned(", '    *owned("it is an example", "model.id", "--example-flag"),\n')
    output = run(
        tmp_path,
        "import yaml\n"
        "from mmrouter_cli.cluster_commands import crd_text\n"
        "from mmrouter_lib.api import SpecError, parse_deployment\n"
        "body = yaml.safe_load(open('examples/mmrouter.yaml'))\n"
        "body['spec']['engine']['args'] = ['--example-flag=1']\n"
        "try: parse_deployment(body)\n"
        "except SpecError as error: print(error)\n"
        "print('--example-flag' in crd_text())\n",
    )
    *refusal, in_crd = output.splitlines()
    assert "--example-flag cannot be set here" in "".join(refusal)
    assert "; use spec.model.id" in "".join(refusal)
    assert in_crd == "True"


def test_a_metric_is_one_line_of_the_table(copy: Copy, tmp_path: Path) -> None:
    metrics = copy("router") / "mmrouter_router" / "telemetry" / "metrics.py"
    line = '        self.example = counter("example", "Examples by label", "label")\n'
    insert(metrics, "        self.requests = counter(", line)
    page = run(tmp_path, "from hack import generate; print(generate.metrics_page())")
    assert "| `mmrouter_example_total` | counter | `label` |  | Examples by label |" in page


FAMILY = """
from mmrouter_lib.families.base.family import register
from mmrouter_lib.families.llava import Llava

register("example", lambda *_: Llava(7, "<image>", 336, 42, 64, name="example"), proved_on=("vllm",))
"""


def test_a_model_family_is_one_module(copy: Copy, tmp_path: Path) -> None:
    (copy("mmrouter") / "mmrouter_lib" / "families" / "example.py").write_text(FAMILY)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "example"}')
    output = run(
        tmp_path,
        "from pathlib import Path\n"
        "from mmrouter_lib.families import is_proved, load_family\n"
        f"print(load_family(Path({str(model)!r}), None).count(10, 10), is_proved('example', 'vllm'))\n",
    )
    assert output == "64 True\n"


CHILD = """
from mmrouter_operator.render.child import ChildKind
from mmrouter_operator.render.child import object_metadata

KIND = ChildKind("LimitRange", "v1", wave=1)


def render(inputs):
    return [{"apiVersion": "v1", "kind": "LimitRange", "metadata": object_metadata(inputs.dep, "example", "frontend")}]
"""


def test_a_child_object_is_one_module_and_its_place_in_the_list(copy: Copy, tmp_path: Path) -> None:
    render = copy("operator") / "mmrouter_operator" / "render"
    (render / "limitrange.py").write_text(CHILD)
    insert(render / "__init__.py", "    networkpolicy,\n", "    limitrange,\n")
    insert(
        render / "__init__.py",
        "    networkpolicy,\n    pdb,\n    persistentvolumeclaim,\n    pool,\n    frontend",
        "    limitrange,\n",
    )
    output = run(
        tmp_path,
        "import yaml\n"
        "from mmrouter_lib.api import parse_deployment\n"
        "from mmrouter_operator.model.credentials import new_secret_data\n"
        "from mmrouter_operator.render import render\n"
        "from hack.generators.cluster_role import cluster_role\n"
        "dep = parse_deployment(yaml.safe_load(open('examples/mmrouter.yaml')))\n"
        "print([child['kind'] for child in render(dep, secrets=new_secret_data())].count('LimitRange'))\n"
        "rules = yaml.safe_load(cluster_role())['rules']\n"
        "print([rule['verbs'] for rule in rules if 'limitranges' in rule['resources']])\n",
    )
    assert output.splitlines() == ["1", "[['get', 'list', 'watch', 'create', 'patch', 'delete']]"]
