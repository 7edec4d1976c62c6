"""What `helm test` asks: is an operator ready, and does the cluster serve the API? Standard library only.

    check.py OPERATOR_URL API_SERVER_URL [ACCOUNT_FOLDER]

Exit status 1 and a sentence when not.
"""

import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
PATIENCE = 60.0
"""Seconds until the operator must be ready: it may just have been installed."""


def ready(url: str, deadline: float) -> str:
    """Wait for the operator and return what is wrong with it, empty for nothing."""
    while True:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):  # noqa: S310 - the chart's own URL
                return ""
        except urllib.error.HTTPError as error:
            problem = error.read().decode(errors="replace").strip()
        except OSError as error:
            problem = str(error)
        if time.monotonic() >= deadline:
            return f"the operator is not ready: {problem}"
        time.sleep(1)


def served(url: str, account: Path) -> str:
    """Return why the API is not served, empty when it is."""
    token = (account / "token").read_text().strip()
    header = {"authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{url}/apis/mmrouter.io/v1alpha1", headers=header)  # noqa: S310
    context = ssl.create_default_context(cafile=str(account / "ca.crt"))
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:  # noqa: S310
            kinds = [resource["kind"] for resource in json.load(answer)["resources"]]
    except urllib.error.HTTPError as error:
        return f"the cluster does not serve mmrouter.io/v1alpha1 ({error.code}): is the CRD installed?"
    except OSError as error:
        return f"the API server does not answer: {error}"
    return "" if "MMRouterDeployment" in kinds else "mmrouter.io/v1alpha1 has no MMRouterDeployment"


def main(operator: str, api_server: str, account: str = ACCOUNT) -> int:
    """Run both checks and return the exit status."""
    problem = served(api_server, Path(account)) or ready(operator, time.monotonic() + PATIENCE)
    print(problem or "the operator is ready, and the cluster serves mmrouter.io/v1alpha1")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
