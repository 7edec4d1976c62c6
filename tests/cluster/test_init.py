"""What `mmrouter init` writes is taken by the real API server, for every engine on every accelerator."""

import itertools

import pytest
from cluster.controlplane import ControlPlane

from mmrouter_cli.init import answers as init
from mmrouter_operator.cluster.child_kinds import KINDS
from mmrouter_operator.model.kinds import RESOURCE


@pytest.mark.parametrize(("engine", "kind"), list(itertools.product(init.ENGINES, init.KINDS)))
def test_the_server_takes_it(crd: ControlPlane, engine: str, kind: str) -> None:
    made = init.resource(init.Answers(engine=engine, accelerator=kind))
    path = KINDS[RESOURCE].path("default")
    answer = crd.request("POST", path, made, dryRun="All", fieldValidation="Strict")
    assert answer.status_code == 201, answer.text


def test_kubectl_reads_the_text_as_we_do(crd: ControlPlane) -> None:
    """With its own YAML reader, and a name and an image that others may take for something else."""
    answers = init.Answers(model="org/Model-1e3", name="no", image="registry.example:5000/e:1")
    done = crd.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=init.text(answers))
    assert done.returncode == 0, done.stderr
