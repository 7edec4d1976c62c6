"""The chart's files against the rest of the repository: the CRD, the versions, what Artifact Hub shows."""

import copy
from pathlib import Path

import pytest
import yaml
from chart.helm import CHART, ROOT, Helm

import mmrouter_lib as mmrouter
from mmrouter_lib.api import parse_deployment
from mmrouter_lib.api.crd import NAME, definition

META = yaml.safe_load((CHART / "Chart.yaml").read_text())


def test_the_chart_holds_the_crds_as_they_are() -> None:
    ours = {path.name: path.read_text() for path in (CHART / "files" / "crds").glob("*")}
    assert ours == {path.name: path.read_text() for path in (ROOT / "crds").glob("*")}


def test_the_release_has_the_crd_to_the_letter_and_keeps_it(helm: Helm) -> None:
    made = copy.deepcopy(helm.render().one("CustomResourceDefinition"))
    assert made["metadata"]["annotations"].pop("helm.sh/resource-policy") == "keep"
    (file,) = (ROOT / "crds").glob("*.yaml")
    assert made == yaml.load(file.read_text(), yaml.CSafeLoader)


def test_the_crd_can_be_left_to_others(helm: Helm) -> None:
    assert helm.render({"crds": {"install": False}}).all("CustomResourceDefinition") == []


def test_chart_and_code_have_one_version() -> None:
    assert META["appVersion"] == mmrouter.__version__
    assert META["version"] == mmrouter.__version__


def test_the_annotations_for_artifact_hub_match_the_code(helm: Helm) -> None:
    told = {key.partition("/")[2]: value for key, value in META["annotations"].items()}
    (crd,) = yaml.safe_load(told["crds"])
    assert (crd["name"], crd["kind"]) == (NAME, definition()["spec"]["names"]["kind"])
    assert crd["version"] in {version["name"] for version in definition()["spec"]["versions"]}
    assert [image["image"] for image in yaml.safe_load(told["images"])] == [helm.render().operator["image"]]
    assert all({"kind", "description"} == set(change) for change in yaml.safe_load(told["changes"]))
    (example,) = yaml.safe_load(told["crdsExamples"])
    assert parse_deployment(example).spec == parse_deployment(_example()).spec


def _example() -> dict[str, object]:
    found: dict[str, object] = yaml.safe_load((ROOT / "examples" / "mmrouter.yaml").read_text())
    return found


def test_a_package_holds_everything(helm: Helm, tmp_path: Path) -> None:
    done = helm.run("package", CHART, f"--destination={tmp_path}")
    assert done.returncode == 0, done.stderr
    packed = helm.run(
        "template", "mmrouter", f"{tmp_path}/mmrouter-{META['version']}.tgz", "--namespace=mmrouter-system"
    )
    assert packed.stdout == helm.run("template", "mmrouter", CHART, "--namespace=mmrouter-system").stdout


@pytest.mark.parametrize("name", ["values.yaml", "Chart.yaml"])
def test_no_line_ends_in_a_blank(name: str) -> None:
    assert not [line for line in (CHART / name).read_text().splitlines() if line != line.rstrip()]
