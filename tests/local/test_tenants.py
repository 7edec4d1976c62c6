"""API keys: who asks decides the salt, and tenants share no block."""

import openai
import pytest
import yaml
from local.rig import ROOT, running

from mmrouter_cli.sample_images import data_uri, picture

SECRET = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"name": "keys"},
    "stringData": {"red": "key-of-red", "blue": "key-of-blue"},
}
MESSAGES = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Both tenants ask exactly the same question about the same picture. " * 2},
            {"type": "image_url", "image_url": {"url": data_uri(picture("shared", 112, 112))}},
        ],
    }
]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    """One engine, one frontend, two tenants."""
    resource = yaml.safe_load((ROOT / "examples" / "demo.yaml").read_text())
    resource["metadata"]["name"] = "tenants"
    resource["spec"]["frontend"].update(replicas=1, apiKeys={"secret": {"name": "keys"}})
    resource["spec"]["pools"][0]["replicas"] = 1
    resource["spec"]["model"]["volume"]["hostPath"]["path"] = str(ROOT / "examples" / "models" / "tiny-qwen2-vl")
    file = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    file.write_text(yaml.safe_dump_all([SECRET, resource]))
    with running(file) as deployment:
        yield deployment


def ask(deployment, key):
    client = openai.OpenAI(
        base_url=f"{deployment.url}/v1", api_key=key, default_headers={"x-mmrouter-control": deployment.token}
    )
    raw = client.chat.completions.with_raw_response.create(model="tenants", messages=MESSAGES, max_tokens=2)
    return raw.parse().usage, raw.headers


@pytest.mark.parametrize("key", ["nonsense", "key-of-reD"])
def test_a_wrong_key_is_a_401_in_openais_shape(deployment, key):
    with pytest.raises(openai.AuthenticationError) as caught:
        ask(deployment, key)
    assert caught.value.status_code == 401
    assert caught.value.code == "invalid_api_key"


def test_models_need_a_key_too(deployment):
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="x").models.list()


def test_tenants_share_no_block_predicted_or_real(deployment):
    first, _ = ask(deployment, "key-of-red")
    assert first.prompt_tokens_details.cached_tokens == 0
    other, headers = ask(deployment, "key-of-blue")
    assert other.prompt_tokens_details.cached_tokens == 0
    assert headers["x-mmrouter-overlap-blocks"] == "0"
    again, headers = ask(deployment, "key-of-blue")
    assert headers["x-mmrouter-exactness"] == "exact"
    assert again.prompt_tokens_details.cached_tokens >= 16 * (int(headers["x-mmrouter-prompt-blocks"]) - 1)


def test_the_gate_passes_with_a_tenants_key_and_fails_without(deployment):
    good = deployment.mmrouter("verify", deployment.url, "--api-key", "key-of-red")
    assert good.returncode == 0, good.stdout + good.stderr
    assert deployment.mmrouter("verify", deployment.url, "--api-key", "nonsense").returncode == 1
