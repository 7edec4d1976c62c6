#!/usr/bin/env bash
# Route the addresses of a kind cluster's pods and Services from this machine, by its nodes: tests ask engines
# themselves, which listen on the address of their pod only, so that no port can be forwarded to them.
set -euo pipefail
services=10.96.0.0/16 # kind's default
route() { $([ "$(id -u)" -eq 0 ] || echo sudo) ip route replace "$1" via "$2"; }

nodes=$(kubectl get nodes --output=jsonpath='{range .items[*]}{.spec.podCIDR} {.status.addresses[0].address}{"\n"}{end}')
while read -r pods node; do
  route "$pods" "$node"
  route "$services" "$node" # any node does
done <<<"$nodes"
