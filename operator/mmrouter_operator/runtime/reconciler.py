"""One reconcile: observe, plan, apply, and the status last. Level-based: its trigger does not matter."""

import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from mmrouter_lib.api import MMRouterDeployment, SpecError, parse_deployment
from mmrouter_lib.api.deployment import NO_SUCH_FIELD
from mmrouter_operator.cluster.cache import WatchCache, keys_of
from mmrouter_operator.cluster.child_writer import ChildWriter, WriteResult, belongs_to_other
from mmrouter_operator.cluster.client import (
    AlreadyExists,
    ApiError,
    Conflict,
    KubernetesCluster,
    LeaseLost,
    NotFound,
    Object,
)
from mmrouter_operator.cluster.existence import RECHECK_SECONDS, ExistenceCache
from mmrouter_operator.cluster.frontend_stream_reader import FrontendStreams
from mmrouter_operator.cluster.work_queue import ObjectDeleted, Retry
from mmrouter_operator.metrics import Metrics
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.credentials import SecretData, new_secret_data
from mmrouter_operator.model.external_refs import Reference, references
from mmrouter_operator.model.kinds import FRONTEND_ROLE, Capabilities, Ref
from mmrouter_operator.model.newer_crd_fields import schema_in, without_defaults
from mmrouter_operator.model.snapshot import (
    CHILD_NAME_TAKEN,
    CHILD_REFUSED,
    SECRET_MALFORMED,
    SECRET_RECREATED,
    Key,
    Problem,
    Snapshot,
)
from mmrouter_operator.planning.planner import RolloutPlan, plan
from mmrouter_operator.planning.pod_readiness_gates import counted_reports, gate_changes, is_verified
from mmrouter_operator.planning.template_choice import adopts, choose_templates
from mmrouter_operator.render import CHILD_KINDS, render
from mmrouter_operator.render.child import secret_name
from mmrouter_operator.render.secret import render_secret
from mmrouter_operator.status.writer import StatusWriter

log = logging.getLogger(__name__)

SCHEMA_RETRIES = 4
"""Reconciles in a row, a few seconds in all, that wait for the schema of a CRD which was just replaced."""
GATE_RETRY_SECONDS = 1.0
"""Seconds until a pod that did not take its gate_changes is looked at again; one that is gone is not there then."""
REPORTED_FAILURES = 3
"""Reconciles in a row with failing writes after which the status reports them."""


class Reconciler:
    """Reconciles deployments. ``capabilities`` is set when the served APIs change."""

    def __init__(
        self,
        cluster: KubernetesCluster,
        cache: WatchCache,
        streams: FrontendStreams,
        *,
        config: OperatorConfig,
        metrics: Metrics,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._streams = streams
        self._config = config
        self._children = ChildWriter(cluster, cache, metrics)
        self._lookup = ExistenceCache(cluster)
        self._statuses = StatusWriter(cluster, cache, metrics)
        self._followed: dict[Key, float] = {}  # key -> since when, seconds since the epoch
        self._recreated: dict[Key, Problem] = {}
        self._failures: Counter[Key] = Counter()
        self._unpublished: Counter[Key] = Counter()
        self._metrics = metrics
        self.capabilities = Capabilities()

    async def reconcile(self, key: Key) -> float | None:
        """Bring one deployment nearer to its spec. Returns the seconds until its next reconcile, if one is due.

        Raises :class:`ObjectDeleted` and :class:`Retry`, which are outcomes; anything else is a bug.
        """
        resource = self._cache.resource(key)
        if resource is None or "deletionTimestamp" in resource["metadata"]:
            self._forget(key)
            raise ObjectDeleted
        written = WriteResult()
        try:
            return await self._reconcile(key, resource, written)
        except LeaseLost as error:
            raise Retry(str(error), reset=True) from error
        except ApiError as error:
            # NotFound: the resource or its namespace was deleted meanwhile, and its event is on the way.
            what = "deleted meanwhile" if isinstance(error, NotFound) else type(error).__name__
            raise Retry(f"{what}: {error}", error.retry_after or 0.0, reset=written.progressed) from error

    def retire(self) -> None:
        """Stop after another replica took over: close the streams, show no conditions."""
        for key in list(self._followed):
            self._streams.forget(key)
        self._followed.clear()
        self._statuses.retire()

    async def _reconcile(self, key: Key, resource: Object, written: WriteResult) -> float | None:
        # The status is no input: one written by a later release must not make the resource invalid.
        spec_only = {name: value for name, value in resource.items() if name != "status"}
        try:
            dep = await self._parsed(key, spec_only)
        except SpecError as error:
            return await self._invalid(key, resource, error, written)
        try:
            return await self._carry_out(key, resource, dep, written)
        except (ApiError, LeaseLost, Retry):
            raise
        except Exception as error:
            # A bug. The queue logs the traceback and retries, because another state of the pods may not trigger it.
            message = f"the operator failed at this resource and tries again: {type(error).__name__}: {error}"
            try:
                await self._statuses.failed(key, resource, message, time.time())
            except (ApiError, LeaseLost) as other:
                about = {"namespace": key[0], "object": key[1]}
                log.warning("the failure could not be written to the status: %s", other, extra=about)
            raise

    async def _parsed(self, key: Key, resource: Object) -> MMRouterDeployment:
        """Return the typed resource, without defaulted fields of a newer CRD. Raises ``SpecError``."""
        try:
            dep = parse_deployment(resource)
        except SpecError as error:
            if not any(sentence == NO_SUCH_FIELD for _, sentence in error.errors):
                raise
            try:
                published = await self._cluster.published()
            except NotFound:
                published = {}
            known, dropped, complete = without_defaults(resource, schema_in(published))
            if not complete:
                self._unpublished[key] += 1
                if self._unpublished[key] <= SCHEMA_RETRIES:
                    raise Retry(f"{error}; the CRD is newer, and its schema is not published yet") from error
            dep = parse_deployment(known)
            for path in self._metrics.ignored(key, dropped):
                log.warning("%s/%s: %s is unknown to this release and has its default value: ignored", *key, path)
        else:
            self._metrics.ignored(key, ())
        self._unpublished.pop(key, None)
        return dep

    async def _invalid(self, key: Key, resource: Object, error: SpecError, written: WriteResult) -> float | None:
        """Report an invalid resource. Its children stay unchanged until the resource changes."""
        snapshot = self._snapshot(key, resource, None, ())
        again_in = await self._statuses.write(key, resource, error, snapshot, None, written)
        self._publish(key, None)
        if written.failures:
            raise written.failures[0][1]
        return again_in

    async def _carry_out(
        self, key: Key, resource: Object, dep: MMRouterDeployment, written: WriteResult
    ) -> float | None:
        missing = await self._lookup.missing(references(dep))
        secrets = await self._secrets(key, dep, written)
        self._follow(key, dep, secrets)
        snapshot = self._snapshot(key, resource, secrets, missing)
        if missing:
            written.retry_in(RECHECK_SECONDS)
        planned: RolloutPlan | None = None
        if secrets is not None:
            try:
                rendered = render(dep, secrets=secrets, capabilities=self.capabilities, config=self._config)
            except SpecError as error:
                # Pods of the spec before are still replaced, for instance when their node is lost.
                await self._gates(dep, snapshot, written)
                return await self._invalid(key, resource, error, written)
            desired = [child for child in rendered if child["kind"] != "Secret"]
            desired, revision = choose_templates(desired, snapshot, adopts(dep), dep)
            planned = plan(desired, snapshot)
            if not dep.spec.paused:
                await self._apply(key, snapshot, planned, revision, written)
                # The status of this reconcile includes its own writes.
                snapshot = self._snapshot(key, resource, secrets, missing)
        await self._gates(dep, snapshot, written)
        recreated = self._recreated.get(key)
        if recreated is not None:
            written.problems.append(recreated)
        self._failing(key, written)
        again_in = await self._statuses.write(key, resource, dep, snapshot, planned, written)
        self._publish(key, planned)
        # From here on the status itself holds it.
        self._recreated.pop(key, None)
        if written.failures:
            raise written.failures[0][1]
        return again_in

    def _failing(self, key: Key, written: WriteResult) -> None:
        """Report failures that repeat, such as a webhook that is down; a single one is not reported."""
        if not written.failures:
            self._failures.pop(key, None)
            return
        self._failures[key] += 1
        if self._failures[key] >= REPORTED_FAILURES:
            for ref, error in written.failures:
                written.problems.append(Problem(CHILD_REFUSED, ref.kind, ref.name, f"{ref.kind} {ref.name}: {error}"))

    async def _apply(
        self, key: Key, snapshot: Snapshot, planned: RolloutPlan, revision: Object | None, written: WriteResult
    ) -> None:
        owner = snapshot.resource["metadata"]["uid"]
        manifests = [*([revision] if revision else []), *planned.apply]
        await self._children.write(key, owner, manifests, written)
        # Nothing that runs is taken away while what replaces it could not be written. Renderings that nothing uses go
        # in any case: they are large, and every change of the spec makes one more.
        surplus = {
            Ref(CHILD_KINDS[kind].api, kind, key[0], name): uid
            for kind, name, uid in planned.prune
            if written.may_prune or kind == "ControllerRevision"
        }
        await self._children.prune(key, surplus, written)

    async def _secrets(self, key: Key, dep: MMRouterDeployment, written: WriteResult) -> SecretData | None:
        """Return the deployment's keys, created if there are none. ``None``, with a problem, if they are unusable."""
        name = secret_name(dep)
        secret = self._cache.secret(key, name)
        if secret is None and not dep.spec.paused:
            secret = await self._create_secret(key, dep, written)
        seen = self._cache.children(key).get(("Secret", name))
        if seen is not None and seen.owner not in ("", dep.metadata.uid):
            message = f"Secret {name} is not this resource's"
            written.problems.append(Problem(CHILD_NAME_TAKEN, "Secret", name, message))
        elif isinstance(secret, str):
            message = f"Secret {name}: {secret}; delete it to get a new one"
            written.problems.append(Problem(SECRET_MALFORMED, "Secret", name, message))
        else:
            return secret
        return None

    async def _create_secret(self, key: Key, dep: MMRouterDeployment, written: WriteResult) -> SecretData | str | None:
        """Put keys into the cluster and the cache: those of the Secret that this operator saw being deleted, so that no
        pod restarts; or else new ones; or those that another replica of the operator has just made.
        """
        kept = self._cache.lost_secret(key, dep.metadata.uid)
        manifest = render_secret(dep, kept or new_secret_data())
        ref = Ref.of(manifest)
        # Deployments of a deleted resource of the same name do not count: they are being deleted.
        lost = any(
            kind == "Deployment" and view.owner == dep.metadata.uid
            for (kind, _), view in self._cache.children(key).items()
        )
        try:
            live = await self._cluster.create(manifest)
        except AlreadyExists:
            existing = await self._cluster.get(ref)
            if existing is None:
                raise Conflict(f"Secret {ref.name} was created and deleted meanwhile") from None
            if belongs_to_other(existing, dep.metadata.uid):
                message = f"Secret {ref.name} is not this resource's"
                written.problems.append(Problem(CHILD_NAME_TAKEN, "Secret", ref.name, message))
                written.retry_in(RECHECK_SECONDS)
                return None
            live, lost = existing, False
        self._cache.put("Secret", live)
        if lost and kept is not None:
            log.warning("%s/%s: Secret %s was deleted and is created again with the same keys", *key, ref.name)
        elif lost:
            message = f"Secret {ref.name} was lost and is created again: every pod restarts with new keys"
            self._recreated[key] = Problem(SECRET_RECREATED, "Secret", ref.name, message)
        return keys_of(live)

    def _snapshot(
        self, key: Key, resource: Mapping[str, Any], secrets: SecretData | None, missing: tuple[Reference, ...]
    ) -> Snapshot:
        return Snapshot(
            resource=resource,
            now=time.time(),
            children=self._cache.children(key),
            pods=self._cache.pods(key),
            reports=self._streams.reports(key),
            secrets=secrets,
            missing=missing,
            revisions=self._cache.revisions(key, resource["metadata"]["uid"]),
            capabilities=self.capabilities,
            config=self._config,
            listening_since=self._followed.get(key, 0.0),
        )

    def _follow(self, key: Key, dep: MMRouterDeployment, secrets: SecretData | None) -> None:
        if secrets is None:
            return
        frontends = {
            pod.uid: pod.ip
            for pod in self._cache.pods(key)
            if pod.role == FRONTEND_ROLE and pod.ip and pod.phase == "Running" and not pod.deleting
        }
        self._followed.setdefault(key, time.time())
        self._streams.follow(key, frontends, secrets.control_token)

    def _publish(self, key: Key, planned: RolloutPlan | None) -> None:
        """Let the frontends have the status and the steps of the plan, which their live pages show."""
        resource = self._cache.resource(key)
        status = (resource or {}).get("status") or {}
        shown = {name: status[name] for name in ("phase", "frontend", "pools", "conditions") if name in status}
        self._streams.publish(key, {**shown, "steps": planned.steps if planned is not None else ()})

    async def _gates(self, dep: MMRouterDeployment, snapshot: Snapshot, written: WriteResult) -> None:
        pods = {pod.uid: pod for pod in snapshot.pods}
        for uid, wanted in gate_changes(dep, snapshot).items():
            pod = pods[uid]
            if any(pod.gates.get(gate, False) != value for gate, (value, _, _) in wanted.items()):
                try:
                    await self._cluster.apply_gates(pod, wanted)
                except (NotFound, Conflict) as error:
                    log.info("gates not set: %s", error, extra={"namespace": pod.namespace, "child": pod.name})
                    # A new pod of its name, or one that others keep writing: an event need not follow.
                    written.retry_in(GATE_RETRY_SECONDS)
                except ApiError as error:
                    # Other pods and the status do not wait for one that a webhook, for instance, refuses.
                    written.failures.append((Ref("v1", "Pod", pod.namespace, pod.name), error))
        self._wait_for_verification(dep, snapshot, written)

    def _wait_for_verification(self, dep: MMRouterDeployment, snapshot: Snapshot, written: WriteResult) -> None:
        """Reconcile again when a pod's verification times out, because no event happens then.

        Also of a pod whose gates are open: its engine may have restarted and must be proved again.
        """
        timeout = float(dep.spec.verification.timeout_seconds)
        for pod in snapshot.pods:
            proved = is_verified(counted_reports(pod, snapshot)) if pod.pool else True
            if pod.started is not None and not (proved and all(pod.gates.values())):
                left = pod.started + timeout - snapshot.now
                if left > 0:
                    written.retry_in(left + 0.5)

    def _forget(self, key: Key) -> None:
        self._streams.forget(key)
        for known in (self._followed, self._recreated, self._failures, self._unpublished):
            known.pop(key, None)
        self._metrics.ignored(key, ())
        self._children.forget(key)
        self._statuses.forget(key)
