"""The image of a node of kind, from Debian's packages, kind's own files and the programs of ``hack/cluster``.

kind's own image comes from a registry, and is built with others that do. This one has Debian's containerd and runc, a
bridge instead of kindnet, and Debian's etcd as a service instead of a pod, which kubeadm takes for an external one.
"""

import os
import shutil
import tempfile
from pathlib import Path

from hack.build_once import captured, digest, failed, note
from hack.cluster.go_programs import MODULE, kubernetes_version, linker_flags
from hack.cluster.go_toolchain import go_env, install, module_folder, run_go
from hack.images import base_image
from hack.kind.docker_daemon import Docker

HERE = Path(__file__).parent
NODE_IMAGE, PAUSE = "mmrouter/kind-node", "localhost/mmrouter-pause:1"
KIND = "sigs.k8s.io/kind@v0.33.0"
COREDNS_TAG = "v1.13.1"
"""Of the image that kubeadm names; the program in it is the one of ``hack/cluster/go_programs.py``."""
PACKAGES = (
    "ca-certificates,systemd,systemd-sysv,dbus,containerd,runc,containernetworking-plugins,conntrack,iptables,ipset,"
    "iproute2,ethtool,util-linux,mount,kmod,pigz,e2fsprogs,curl,jq,procps,etcd-server,socat"
)
ROOT_IMAGE = f"mmrouter/kind-root:{digest(PACKAGES)[:12]}"
PODS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "coredns")


def build_tools(go: str, folder: Path) -> None:
    """Build kind and kubeadm. kubeadm has two modules that ``hack/cluster/kube`` lacks, at the versions that Kubernetes
    requires; they are added to a copy of it.
    """
    install(go, KIND, "-s -w", folder)
    with tempfile.TemporaryDirectory(prefix="mmrouter-kubeadm-") as name:
        for file in ("go.mod", "go.sum"):
            shutil.copy(MODULE / file, name)
        command = [go, "build", "-ldflags", linker_flags(), "-o", f"{folder}/", "k8s.io/kubernetes/cmd/kubeadm"]
        flags = "-mod=mod -trimpath -buildvcs=false"
        run_go(command, "go build of kubeadm", Path(name), {**go_env(), "GOFLAGS": flags})


def recipe() -> str:
    files = sorted(path for path in (HERE / "node").rglob("*") if path.is_file())
    return digest(KIND, PACKAGES, kubernetes_version(), *(path.read_text() for path in files))


def build(docker: Docker, go: str, programs: list[Path]) -> str:
    """Build the image unless it is there; return its name. ``programs``: the folders with the commands. Raises
    :class:`FailedError`, :class:`CannotMakeError`.
    """
    image = f"{NODE_IMAGE}:{recipe()[:12]}"
    if captured(["docker", "image", "inspect", image], env=docker.env).returncode == 0:
        return image
    note(f"building a node of kind, {image} (once, up to 5 minutes)")
    with tempfile.TemporaryDirectory(prefix="mmrouter-kind-node-") as name:
        context = Path(name)
        shutil.copytree(HERE / "node", context, dirs_exist_ok=True)
        kind_files(go, context / "kind")
        (context / "kind" / "kind" / "version").write_text(f"v{kubernetes_version()}")
        (context / "programs").mkdir()
        for folder in programs:
            for program in folder.glob("*"):
                if os.access(program, os.X_OK):
                    shutil.copy(program, context / "programs")
        make_root(docker, context / "root.tar")
        (context / "images").mkdir()
        save_pods(docker, context)
        build_stage(docker, context, "node", image)
    return image


def kind_files(go: str, folder: Path) -> None:
    """Copy the files of kind's base image, as executable as they are there; the module cache has no modes."""
    shutil.copytree(module_folder(go, KIND) / "images/base/files", folder, copy_function=shutil.copyfile)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)


def make_root(docker: Docker, archive: Path) -> None:
    if captured(["docker", "image", "inspect", ROOT_IMAGE], env=docker.env).returncode == 0:
        return
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}"]
    excluded = [f"--dpkgopt=path-exclude={pattern}" for pattern in base_image.LEFT_OUT]
    done = captured([*command, *excluded, base_image.release(), str(archive), *map(str, base_image.sources())])
    if done.returncode != 0:
        raise failed("mmdebstrap", done)
    docker.run("docker", "import", archive, ROOT_IMAGE)
    archive.unlink()


def save_pods(docker: Docker, context: Path) -> None:
    """Write the images of Kubernetes' own pods to where a node loads them from."""
    names = []
    for pod in PODS:
        tag = f"coredns/coredns:{COREDNS_TAG}" if pod == "coredns" else f"{pod}:v{kubernetes_version()}"
        names.append(f"registry.k8s.io/{tag}")
        build_stage(docker, context, pod, names[-1])
    build_stage(docker, context, "pause", PAUSE)
    docker.run("docker", "save", f"--output={context / 'images' / 'pods.tar'}", *names, PAUSE)


def build_stage(docker: Docker, context: Path, stage: str, tag: str) -> None:
    options = (f"--build-arg=ROOT_IMAGE={ROOT_IMAGE}", f"--target={stage}", f"--tag={tag}")
    docker.run("docker", "build", "--quiet", *options, context)
