"""Build the Go programs that clusters of the tests need: Kubernetes' control plane, a node's commands, helm, kind.

    python -m hack.cluster.go_programs kubernetes            # builds the set, or finds it ready; prints its folder
    python -m hack.cluster.go_programs kubernetes --where    # prints the folder only

Sets: ``kubernetes`` (API server, controllers, scheduler, kubectl; about 4 minutes on 2 cores, 0.35 GB), ``node``
(kubelet, kube-proxy, CoreDNS; 2 minutes, 0.25 GB), ``policies`` (kube-router's controller of NetworkPolicies; a minute,
40 MB), ``helm`` (80 seconds, 0.1 GB), ``workflow`` (actionlint, kind; 20 seconds, 20 MB), ``istio`` (pilot and the
definitions of a gateway's resources; 5 minutes, 0.13 GB), ``definitions`` (the latter without a build), ``suite`` and
``picker`` (the inference extension's conformance suite and its own endpoint picker; 3 minutes, 60 MB each) and
``envoy-gateway`` (5 minutes, 0.2 GB), each in a folder of the cache. Kubernetes has the version of ``kube/go.mod``, the
last that works with the containerd of Debian bookworm. Go, etcd and openssl are used where they are installed and never
installed here; Debian bookworm's Go is too old. Requirements of the machine are checked before a long build. Exit
status and cache: ``hack/build_once.py``.
"""

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hack.build_once import (
    CannotMakeError,
    FailedError,
    build_once,
    cache_dir,
    captured,
    digest,
    last_line,
    locked,
    status_of,
)
from hack.cluster.go_toolchain import find_go, go_env, install, module_folder, require_go, run_go, run_in_module

MODULE = Path(__file__).with_name("kube")
POLICIES_MODULE = Path(__file__).with_name("netpol")
CONTROL_PLANE = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
NODE_COMMANDS = ("kubelet", "kube-proxy")
COREDNS = "1.15.0"
HELM = "4.3.1"
HELM_PACKAGE = "helm.sh/helm/v4/cmd/helm"
HELM_FLAGS = f"-s -w -X helm.sh/helm/v4/internal/version.version=v{HELM}"
WORKFLOW_PACKAGES = ("github.com/rhysd/actionlint/cmd/actionlint@v1.7.12", "sigs.k8s.io/kind@v0.33.0")
ISTIO = "istio.io/istio@v0.0.0-20260827124520-eed52ebb66ad"
"""The only version that Go's module proxy has, of the main branch on its way to Istio 1.31."""
ISTIO_GO = "go 1.26"
GATEWAY_DEFINITIONS = {
    "sigs.k8s.io/gateway-api@v1.6.0": [
        f"config/crd/standard/gateway.networking.k8s.io_{name}.yaml"
        for name in ("gatewayclasses", "gateways", "httproutes", "referencegrants")
    ],
    "sigs.k8s.io/gateway-api-inference-extension@v1.5.0": [
        "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml"
    ],
}
"""Modules that Istio requires -> their definitions that a gateway needs."""
SUITE = "sigs.k8s.io/gateway-api-inference-extension/conformance"
SUITE_VERSION = "v1.6.0"
SUITE_BASE = "resources/base.yaml"
ECHO = "sigs.k8s.io/gateway-api/conformance/echo-basic"
PICKER = "sigs.k8s.io/gateway-api-inference-extension@v1.5.0"
"""The last release with the extension's own endpoint picker."""
ENVOY_GATEWAY = "github.com/envoyproxy/gateway/cmd/envoy-gateway@v1.9.1"
ISTIO_DEFINITIONS = "manifests/charts/base/files/crd-all.gen.yaml"
TRAFFIC_RULES = "destinationrules.networking.istio.io"

CONTROL_PLANE_PACKAGES = {"etcd": "etcd-server", "openssl": "openssl"}
NODE_PACKAGES = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "busybox": "busybox-static",
    "etcd": "etcd-server",
    "openssl": "openssl",
}
"""Command that a machine needs to be the node of a cluster -> its Debian package."""
CNI_FOLDERS = ("/usr/lib/cni", "/opt/cni/bin")
CNI_PLUGINS = ("bridge", "host-local", "portmap")


@dataclass(frozen=True)
class ProgramSet:
    """Programs that are built together. ``gigabytes``: free disk space of the build, most of it Go's caches. The folder
    has the recipe in its name where a checkout with another recipe may be running its tests from its own.
    """

    what: str
    folder: Callable[[], Path]
    recipe: Callable[[], str]
    build: Callable[[str, Path], None]
    gigabytes: float
    require: Callable[[], object] = lambda: None


def make(programs: ProgramSet, folder: Path) -> None:
    """Build a set unless its folder is ready. Raises :class:`CannotMakeError`, :class:`FailedError`.

    One set at a time: Go takes every CPU, and two builds at once compile the packages twice that both need.
    """

    def build(folder: Path) -> None:
        with locked(cache_dir() / "go.lock"):
            programs.build(kubernetes_go(), folder)

    programs.require()
    build_once(folder, programs.recipe(), build, what=programs.what, free_gb=programs.gigabytes, require=kubernetes_go)


def kubernetes_version() -> str:
    """Return the version of Kubernetes that ``kube/go.mod`` requires, ``1.35.4``."""
    match = re.search(r"^require k8s\.io/kubernetes v(\S+)$", (MODULE / "go.mod").read_text(), re.MULTILINE)
    assert match, "kube/go.mod names no version of k8s.io/kubernetes on a line of its own"
    return match[1]


def kubernetes_recipe(*commands: str) -> str:
    return digest(*((MODULE / name).read_text() for name in ("go.mod", "go.sum")), linker_flags(), *commands)


def linker_flags() -> str:
    """Return the linker's flags without which Kubernetes' commands report v0.0.0 as their version."""
    major, minor, _ = kubernetes_version().split(".", 2)
    package = "k8s.io/component-base/version"
    values = {"gitVersion": f"v{kubernetes_version()}", "gitMajor": major, "gitMinor": minor}
    return " ".join(["-s", "-w", *(f"-X {package}.{name}={value}" for name, value in values.items())])


def build_control_plane(go: str, folder: Path) -> None:
    for command in CONTROL_PLANE:
        build_kubernetes(go, command, folder)
    check_version([str(folder / "kube-apiserver"), "--version"], f"Kubernetes v{kubernetes_version()}")


def build_node(go: str, folder: Path) -> None:
    for command in NODE_COMMANDS:
        build_kubernetes(go, command, folder)
    install(go, f"github.com/coredns/coredns@v{COREDNS}", "-s -w", folder)


def policies_recipe() -> str:
    return digest(*((POLICIES_MODULE / name).read_text() for name in ("go.mod", "go.sum", "main.go")))


def build_policies(go: str, folder: Path) -> None:
    options = ["-ldflags", "-s -w", "-o", f"{folder}/"]
    run_go([go, "build", *options, "."], "go build of netpol", POLICIES_MODULE, go_env())


def build_helm(go: str, folder: Path) -> None:
    install(go, f"{HELM_PACKAGE}@v{HELM}", HELM_FLAGS, folder)
    check_version([str(folder / "helm"), "version", "--template={{.Version}}"], f"v{HELM}")


def build_picker(go: str, folder: Path) -> None:
    module, _, version = PICKER.partition("@")
    require = ("mod", "edit", f"-require={module}@{version}")
    run_in_module(go, require, ("build", "-mod=mod", "-ldflags", "-s -w", "-o", f"{folder}/epp", f"{module}/cmd/epp"))


def build_commands(packages: Sequence[str], go: str, folder: Path) -> None:
    for package in packages:
        install(go, package, "-s -w", folder)


def istio_recipe() -> str:
    return digest(ISTIO, json.dumps(GATEWAY_DEFINITIONS), TRAFFIC_RULES)


def build_istio(go: str, folder: Path) -> None:
    """Build pilot, and take the definitions of the resources that it reads from the modules, into ``crds``."""
    require_go(go, ISTIO_GO, "Istio")
    module, _, version = ISTIO.partition("@")
    install(go, f"{module}/pilot/cmd/pilot-discovery@{version}", "-s -w", folder)
    (crds := folder / "crds").mkdir()
    copy_definitions(go, crds)
    documents = (module_folder(go, ISTIO) / ISTIO_DEFINITIONS).read_text().split("\n---\n")
    (crds / f"{TRAFFIC_RULES}.yaml").write_text(next(each for each in documents if f"name: {TRAFFIC_RULES}" in each))


def copy_definitions(go: str, folder: Path) -> None:
    for module, files in GATEWAY_DEFINITIONS.items():
        for file in files:
            shutil.copyfile(module_folder(go, module) / file, folder / Path(file).name)


def build_suite(go: str, folder: Path) -> None:
    """Build the inference extension's conformance suite and the server that its pods run; copy its resources."""
    require_go(go, ISTIO_GO, "the suite")
    flags = ("-ldflags", "-s -w", "-o")
    run_in_module(
        go,
        ("get", *(f"{module}@{SUITE_VERSION}" for module in (SUITE, SUITE.rpartition("/")[0]))),
        ("test", "-c", "-vet=off", *flags, f"{folder}/suite", SUITE),
        ("build", *flags, f"{folder}/echo", ECHO),
    )
    shutil.copyfile(module_folder(go, f"{SUITE}@{SUITE_VERSION}") / SUITE_BASE, folder / Path(SUITE_BASE).name)


def build_kubernetes(go: str, command: str, folder: Path) -> None:
    options = ["-ldflags", linker_flags(), "-o", f"{folder}/"]
    run_go([go, "build", *options, f"k8s.io/kubernetes/cmd/{command}"], f"go build of {command}", MODULE, go_env())


def kubernetes_go() -> str:
    """Return a Go that is new enough for Kubernetes. Raises :class:`CannotMakeError`."""
    wanted = re.search(r"^go (\d+)\.(\d+)", (MODULE / "go.mod").read_text(), re.MULTILINE)
    assert wanted, "kube/go.mod names no version of Go"
    return find_go(wanted[0], f"Kubernetes {kubernetes_version()}")


def check_version(command: list[str], wanted: str) -> None:
    """Run a command that prints its version. Raises :class:`FailedError` when it is another one."""
    done = captured(command)
    if done.stdout.strip() != wanted:
        actual = done.stdout.strip() or last_line(done.stderr)
        raise FailedError(f"the built {Path(command[0]).name} has the version {actual!r}, not {wanted!r}")


def cni_folder() -> Path | None:
    folders = (Path(folder) for folder in CNI_FOLDERS)
    return next((folder for folder in folders if all((folder / name).is_file() for name in CNI_PLUGINS)), None)


def missing_for_node() -> list[str]:
    """Return what this machine lacks to be a node, each with the Debian package that has it."""
    lacks = [f"{name} (Debian: {package})" for name, package in NODE_PACKAGES.items() if shutil.which(name) is None]
    if cni_folder() is None:
        lacks.append("the CNI plugins (Debian: containernetworking-plugins)")
    return lacks


def require_node() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        raise CannotMakeError("a node of a cluster needs root on Linux")
    if lacks := missing_for_node():
        raise CannotMakeError(f"a node of a cluster needs {', '.join(lacks)}")


def require_ipset() -> None:
    if shutil.which("ipset") is None:
        raise CannotMakeError("NetworkPolicies are enforced with ipset (Debian: ipset)")


def require_control_plane() -> None:
    for name, package in CONTROL_PLANE_PACKAGES.items():
        if shutil.which(name) is None:
            raise CannotMakeError(f"there is no {name} here (Debian: {package})")


def kubernetes_folder() -> Path:
    return cache_dir() / "cluster" / f"{kubernetes_version()}-{kubernetes_recipe(*CONTROL_PLANE)[:8]}"


def node_recipe() -> str:
    return kubernetes_recipe(*NODE_COMMANDS, COREDNS)


def in_folder(
    name: str,
    what: str,
    recipe: Callable[[], str],
    build: Callable[[str, Path], None],
    gigabytes: float,
    require: Callable[[], object] = lambda: None,
) -> ProgramSet:
    """Return a set in a folder of the cache that has the recipe in its name."""
    return ProgramSet(what, lambda: cache_dir() / name / recipe()[:8], recipe, build, gigabytes, require)


SETS = {
    "kubernetes": ProgramSet(
        f"Kubernetes {kubernetes_version()} (once, up to 6 minutes)",
        kubernetes_folder,
        *(partial(kubernetes_recipe, *CONTROL_PLANE), build_control_plane, 4, require_control_plane),
    ),
    "node": in_folder(
        "node", "kubelet, kube-proxy and CoreDNS (once, up to 4 minutes)", node_recipe, build_node, 5, require_node
    ),
    "policies": in_folder(
        "policies",
        "kube-router's controller (once, up to 2 minutes)",
        policies_recipe,
        build_policies,
        2,
        require_ipset,
    ),
    "helm": ProgramSet(
        f"helm {HELM} (once, up to 2 minutes)",
        lambda: cache_dir() / "helm" / HELM,
        *(partial(digest, HELM, HELM_PACKAGE, HELM_FLAGS), build_helm, 3),
    ),
    "istio": in_folder("istio", "Istio's pilot (once, up to 10 minutes)", istio_recipe, build_istio, 5),
    "definitions": in_folder(
        "definitions",
        "the definitions of gateways (once, a minute)",
        partial(digest, json.dumps(GATEWAY_DEFINITIONS)),
        copy_definitions,
        1,
    ),
    "suite": in_folder(
        "suite",
        "the extension's conformance suite (once, up to 5 minutes)",
        partial(digest, SUITE, SUITE_VERSION, ECHO),
        build_suite,
        3,
    ),
    "picker": in_folder(
        "picker", "the extension's endpoint picker (once, up to 5 minutes)", partial(digest, PICKER), build_picker, 3
    ),
    "envoy-gateway": in_folder(
        "envoy-gateway",
        "Envoy Gateway (once, up to 10 minutes)",
        partial(digest, ENVOY_GATEWAY),
        partial(build_commands, [ENVOY_GATEWAY]),
        5,
        lambda: require_go(kubernetes_go(), ISTIO_GO, "Envoy Gateway"),
    ),
    "workflow": in_folder(
        "workflow",
        "actionlint and kind (once, up to a minute)",
        partial(digest, *WORKFLOW_PACKAGES),
        partial(build_commands, WORKFLOW_PACKAGES),
        1,
    ),
}


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Build a set of Go programs for test clusters and print its folder.")
    parser.add_argument("set", choices=list(SETS))
    parser.add_argument("--where", action="store_true", help="print the folder and build nothing")
    options = parser.parse_args()
    programs = SETS[options.set]
    folder = programs.folder()
    if not options.where and (status := status_of(partial(make, programs, folder))):
        return status
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
