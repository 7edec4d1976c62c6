"""How a kubeconfig is read: whatever is wrong with one is a sentence that names it."""

from pathlib import Path

import pytest

from mmrouter_cli.cluster_reader import ClusterError, namespace_of, reading

CONTEXT = """
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:9"}}]
users: [{name: u, user: {}}]
contexts: [{name: x, context: {cluster: c, user: u, namespace: team-a}}]
current-context: x
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: b: c", "is no kubeconfig: mapping values are not allowed here"),
        ("", "is no kubeconfig"),
        ("- a list", "is no kubeconfig"),
        ("a page of words", "is no kubeconfig"),
        ("contexts: []\nclusters: []\nusers: []\ncurrent-context: nope", "Expected object with name nope"),
    ],
)
async def test_a_file_that_is_no_kubeconfig_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "config"
    file.write_text(text)
    assert namespace_of(file) == "default"
    with pytest.raises(ClusterError, match=f"^no way to the cluster: .*{says}") as told:
        async with reading(file):
            pass
    assert str(file) in str(told.value)
    assert "\n" not in str(told.value)


async def test_a_missing_file_is_reported_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "none"
    assert namespace_of(file) == "default"
    with pytest.raises(ClusterError, match="there is no file"):
        async with reading(file):
            pass
    assert capfd.readouterr().err == ""


def test_the_current_contexts_namespace_is_taken(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(CONTEXT)
    assert namespace_of(tmp_path / "config") == "team-a"
