"""Values that a site may give: name -> values, and the options of helm that go with them."""

from typing import Any

MINIMAL = {
    "model": {"id": "Qwen/Qwen2.5-VL-3B-Instruct"},
    "engine": {"type": "vllm"},
    "routing": {"media": {"maxPixels": 64000000}},
    "pools": [{"name": "worker", "role": "worker", "replicas": 2, "accelerator": {"kind": "nvidia"}}],
}
PROMETHEUS = "--api-versions=monitoring.coreos.com/v1"

CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "defaults": ({}, ()),
    "prometheus operator": ({}, (PROMETHEUS,)),
    "one pod": ({"replicas": 1}, ()),
    "none for now": ({"replicas": 0}, ()),
    "one team": ({"watchNamespaces": ["team-a", "team-b"], "crds": {"install": False}}, ()),
    "bare": (
        {
            "rbac": {"create": False},
            "serviceAccount": {"create": False, "name": "theirs"},
            "crds": {"install": False},
            "dashboard": {"enabled": False},
            "networkPolicy": {"enabled": False},
            "podDisruptionBudget": {"enabled": False},
            "metrics": {"podMonitor": {"mode": "Disabled"}},
            "nodeSelector": None,
            "topologySpreadConstraints": [],
            "resources": None,
        },
        (PROMETHEUS,),
    ),
    "everything": (
        {
            "image": {
                "repository": "registry.example:5000/team/mmrouter",
                "tag": "1.2",
                "digest": f"sha256:{'0' * 64}",
                "pullPolicy": "Always",
            },
            "imagePullSecrets": [{"name": "regcred"}],
            "operatorConfig": {
                "image": "registry.example/mmrouter:1",
                "engineImages": {"vllm/nvidia": "registry.example/vllm:0.32.0"},
                "hubEndpoint": "https://hub.example",
                "sharedMemoryRoot": "/dev/shm/ours",
                "prometheusAddress": "http://prometheus.monitoring.svc:9090",
                "podCidrs": ["10.244.0.0/16", "fd00::/8"],
                "apiServerCidrs": ["10.1.2.3/32"],
            },
            "leaderElection": {"leaseDuration": 30, "renewDeadline": 20, "retryPeriod": 2.5},
            "log": {"level": "debug", "format": "text"},
            "serviceAccount": {"annotations": {"example.com/team": "a"}},
            "metrics": {
                "serviceAnnotations": {"prometheus.io/scrape": "true"},
                "podMonitor": {"mode": "Enabled", "interval": "30s", "labels": {"release": "prometheus"}},
            },
            "dashboard": {"namespace": "monitoring", "annotations": {"grafana_folder": "Inference"}},
            "resources": {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"cpu": "1.5", "memory": "1Gi"}},
            "nodeSelector": {"node-role.kubernetes.io/control-plane": ""},
            "tolerations": [{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists"}],
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]
                    }
                }
            },
            "priorityClassName": "system-cluster-critical",
            # The second may not be had: frontends know the operator's pods by it.
            "podLabels": {"example.com/team": "a", "app.kubernetes.io/name": "other"},
            "podAnnotations": {"example.com/note": "yes: [quoted]"},
            "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}],
            "deployments": {
                "qwen-vl": {"spec": MINIMAL},
                "traced": {
                    "namespace": "inference",
                    "spec": {**MINIMAL, "observability": {"otlpEndpoint": "http://own.example:4318"}},
                },
            },
            "observability": {"otlpEndpoint": "http://otel.example:4318"},
        },
        (),
    ),
}
