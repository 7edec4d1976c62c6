//go:build tools

// Package tools names the commands that hack/cluster/go_programs.py builds. The module of Kubernetes replaces its parts by
// folders of its own checkout, which `go install` refuses; go.mod here replaces each by its published version.
package tools

import (
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kube-controller-manager"
	_ "k8s.io/kubernetes/cmd/kube-proxy"
	_ "k8s.io/kubernetes/cmd/kube-scheduler"
	_ "k8s.io/kubernetes/cmd/kubectl"
	_ "k8s.io/kubernetes/cmd/kubelet"
)
