"""The gateway's Prometheus metrics: one line per metric, from which `make generate` writes docs/observability.md."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from mmrouter_lib import __version__


class GatewayMetrics:
    """The metrics of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"mmrouter_gateway_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"mmrouter_gateway_{name}", text, labels, registry=registry)

        self.requests = counter(
            "requests",
            "Requests by deployment and status, 499 for a client that left; without a deployment those that the "
            "gateway answers itself",
            *("deployment", "code"),
        )
        self.refused = counter(
            "refused", "Requests and connections that the gateway refused itself, by reason", "reason"
        )
        self.repeated = counter(
            "repeated", "Requests sent again because a frontend was lost before its answer began", "deployment"
        )
        self.in_flight = gauge("requests_in_flight", "Requests that are being answered")
        self.held_bytes = gauge("held_bytes", "Bytes of request bodies that are held")
        self.deployments = gauge("deployments", "Deployments that requests can go to")
        self.config_refused = gauge(
            "config_refused", "1 while the file of aliases cannot be used, and the last good one still is"
        )
        self.problems = gauge("problems", "Aliases without a deployment, and served names of two deployments")
        self.discovery_errors = counter(
            "discovery_errors", "Failed lists and watches of deployments, by reason", "reason"
        )
        self.discovery_synced = gauge("discovery_synced", "1 while the list of deployments is current")
        self.tls = counter("tls", "Certificates and CAs that were loaded or refused, and failed handshakes", "event")
        gauge("build_info", "Version of the gateway; always 1", "version").labels(__version__).set(1)
