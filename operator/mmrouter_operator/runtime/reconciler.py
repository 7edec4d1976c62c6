"""One reconcile: observe, plan, apply, and the status last. Level-based: what woke it up does not matter."""

import logging
import time
from collections.abc import Mapping
from typing import Any

from mmrouter_lib.api import MMRouterDeployment, SpecError, parse_deployment
from mmrouter_lib.api.deployment import NO_SUCH_FIELD
from mmrouter_operator.cluster.cache import Cache
from mmrouter_operator.cluster.child_writer import Children, Written, taken
from mmrouter_operator.cluster.client import AlreadyThere, ApiError, Cluster, Conflict, Deposed, NotFound, Object
from mmrouter_operator.cluster.frontend_streams import Streams
from mmrouter_operator.cluster.lookup import LOOK_AGAIN, Lookup
from mmrouter_operator.cluster.work_queue import Gone, Retry
from mmrouter_operator.metrics import Metrics
from mmrouter_operator.model.capabilities import Capabilities
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.crd_skew import schema_in, without_defaults
from mmrouter_operator.model.credentials import SecretError, new_secret_data, read_secret
from mmrouter_operator.model.external_refs import references
from mmrouter_operator.model.problems import (
    CHILD_NAME_TAKEN,
    CHILD_REFUSED,
    SECRET_MALFORMED,
    SECRET_RECREATED,
    Problem,
)
from mmrouter_operator.model.refs import KINDS, Ref
from mmrouter_operator.model.snapshot import Key, Missing, Snapshot
from mmrouter_operator.planning.planner import Plan, plan
from mmrouter_operator.planning.readiness_gates import gates, is_verified, told_of
from mmrouter_operator.planning.template_revisions import adopts, choose_templates
from mmrouter_operator.render import render
from mmrouter_operator.render.common import FRONTEND_ROLE, secret_name
from mmrouter_operator.render.secret import SecretData, render_secret
from mmrouter_operator.status.writer import Statuses

log = logging.getLogger(__name__)

PUBLISHED_AFTER = 4
"""Reconciles in a row, a few seconds by their pauses, that wait for the schema of a definition which has just come."""
GATES_AGAIN = 1.0
"""Seconds until a pod that did not take its gates is looked at again; one that is gone is not there then."""
TOLD_AFTER = 3
"""Reconciles in a row with the same failing child after which the status says so."""


class Reconciler:
    """Everything that a reconcile needs. ``capabilities`` is set by whoever follows the served APIs."""

    def __init__(
        self, cluster: Cluster, cache: Cache, streams: Streams, *, config: OperatorConfig, metrics: Metrics
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._streams = streams
        self._config = config
        self._children = Children(cluster, cache, metrics)
        self._lookup = Lookup(cluster)
        self._statuses = Statuses(cluster, cache, metrics)
        self._followed: dict[Key, float] = {}  # key -> since when, seconds since the epoch
        self._recreated: dict[Key, Problem] = {}
        self._failures: dict[Key, int] = {}
        self._unpublished: dict[Key, int] = {}
        self._metrics = metrics
        self.capabilities = Capabilities()

    async def reconcile(self, key: Key) -> float | None:
        """Bring one deployment nearer to its spec. Returns the seconds until it wants to be looked at again, if any.

        Raises :class:`Gone` and :class:`Retry`, which are outcomes; anything else is a bug.
        """
        resource = self._cache.resource(key)
        if resource is None or "deletionTimestamp" in resource["metadata"]:
            self._forget(key)
            raise Gone
        try:
            return await self._reconcile(key, resource)
        except Deposed as error:
            # Nothing was wrong with the deployment.
            raise Retry(str(error), anew=True) from error
        except ApiError as error:
            raise _retry(error) from error

    def retire(self) -> None:
        """Another replica leads: follow nobody, show no conditions."""
        for key in list(self._followed):
            self._streams.forget(key)
        self._followed.clear()
        self._statuses.retire()

    async def _reconcile(self, key: Key, resource: Object) -> float | None:
        # Our own status is no input: one of a later release must not make the resource invalid.
        spec_only = {name: value for name, value in resource.items() if name != "status"}
        try:
            dep = await self._parsed(key, spec_only)
        except SpecError as error:
            return await self._invalid(key, resource, error)
        try:
            return await self._valid(key, resource, dep)
        except (ApiError, Deposed, Retry):
            raise
        except Exception as error:
            # Tried again all the same: what it failed at may be among the pods. The queue logs the traceback.
            said = f"the operator failed at this resource and tries again: {type(error).__name__}: {error}"
            try:
                await self._statuses.failed(key, resource, said, time.time())
            except (ApiError, Deposed) as other:
                log.warning("the failure could not be told: %s", other, extra={"namespace": key[0], "object": key[1]})
            raise

    async def _parsed(self, key: Key, resource: Object) -> MMRouterDeployment:
        """Return the typed resource, without what only a newer definition says. Raises ``SpecError``."""
        try:
            dep = parse_deployment(resource)
        except SpecError as error:
            if not any(sentence == NO_SUCH_FIELD for _, sentence in error.errors):
                raise
            known, dropped, told = without_defaults(resource, schema_in(await self._published()))
            if not told and self._waited(key):
                raise Retry(f"{error}; the definition is newer, and its schema is not published yet") from error
            dep = parse_deployment(known)
            for path in self._metrics.ignored(key, dropped):
                log.warning("%s/%s: %s is unknown to this release and has its default: ignored", *key, path)
        else:
            self._metrics.ignored(key, ())
        self._unpublished.pop(key, None)
        return dep

    async def _published(self) -> Object:
        try:
            return await self._cluster.published()
        except NotFound:
            return {}

    def _waited(self, key: Key) -> bool:
        """Whether to wait once more for a schema that is on its way."""
        self._unpublished[key] = self._unpublished.get(key, 0) + 1
        return self._unpublished[key] <= PUBLISHED_AFTER

    async def _invalid(self, key: Key, resource: Object, error: SpecError) -> float | None:
        """Tell what is wrong. What is there stays as it is, and is looked at again when the resource changes."""
        snapshot = self._snapshot(key, resource, None, ())
        return await self._statuses.write(key, resource, error, snapshot, None, Written([], [], []))

    async def _valid(self, key: Key, resource: Object, dep: MMRouterDeployment) -> float | None:
        written = Written([], [], [])
        try:
            return await self._carry_out(key, resource, dep, written)
        except ApiError as error:
            raise _retry(error, anew=written.progressed) from error

    async def _carry_out(self, key: Key, resource: Object, dep: MMRouterDeployment, written: Written) -> float | None:
        missing = await self._lookup.missing(references(dep))
        secrets = await self._secrets(key, dep, written)
        self._follow(key, dep, secrets)
        snapshot = self._snapshot(key, resource, secrets, missing)
        if missing:
            written.later(LOOK_AGAIN)
        planned: Plan | None = None
        if secrets is not None:
            try:
                rendered = render(dep, secrets=secrets, capabilities=self.capabilities, config=self._config)
            except SpecError as error:
                return await self._invalid(key, resource, error)
            desired = [child for child in rendered if child["kind"] != "Secret"]
            desired, revision = choose_templates(desired, snapshot, adopts(dep), dep)
            planned = plan(desired, snapshot)
            if not dep.spec.paused:
                await self._apply(key, snapshot, planned, revision, written)
                # What the writes have changed belongs into the status of this very reconcile.
                snapshot = self._snapshot(key, resource, secrets, missing)
        await self._gates(dep, snapshot, written)
        recreated = self._recreated.get(key)
        if recreated is not None:
            written.problems.append(recreated)
        self._failing(key, written)
        again_in = await self._statuses.write(key, resource, dep, snapshot, planned, written)
        # Told; from here on the status itself remembers it.
        self._recreated.pop(key, None)
        if written.failures:
            raise written.failures[0][1]
        return again_in

    def _failing(self, key: Key, written: Written) -> None:
        """What fails once passes; what fails again and again, a webhook that is down for one, is told."""
        if not written.failures:
            self._failures.pop(key, None)
            return
        self._failures[key] = self._failures.get(key, 0) + 1
        if self._failures[key] >= TOLD_AFTER:
            for ref, error in written.failures:
                written.problems.append(Problem(CHILD_REFUSED, ref.kind, ref.name, f"{ref.kind} {ref.name}: {error}"))

    async def _apply(
        self, key: Key, snapshot: Snapshot, planned: Plan, revision: Object | None, written: Written
    ) -> None:
        owner = snapshot.resource["metadata"]["uid"]
        manifests = [*([revision] if revision else []), *planned.apply]
        did = await self._children.write(key, owner, manifests)
        written.problems += did.problems
        written.repaired += did.repaired
        written.created += did.created
        written.progressed |= did.progressed
        if did.again_in is not None:
            written.later(did.again_in)
        written.failures += did.failures
        # Nothing that runs is taken away while what replaces it could not be written. Renderings that nothing uses go
        # in any case: they are large, and every change of the spec makes one more.
        doomed = {
            Ref(KINDS[kind].api_version, kind, key[0], name): uid
            for kind, name, uid in planned.prune
            if did.replaced or kind == "ControllerRevision"
        }
        await self._children.prune(key, doomed, written)

    async def _secrets(self, key: Key, dep: MMRouterDeployment, written: Written) -> SecretData | None:
        """Return the deployment's keys; made now if there are none. ``None``, with a problem, when they are no use."""
        name = secret_name(dep)
        seen = self._cache.children(key).get(("Secret", name))
        found = self._cache.secret(key, name)
        if seen is not None and seen.owner not in ("", dep.metadata.uid):
            message = f"Secret {name} is not this resource's"
            written.problems.append(Problem(CHILD_NAME_TAKEN, "Secret", name, message))
            return None
        if isinstance(found, SecretData):
            return found
        if isinstance(found, str):
            message = f"Secret {name}: {found}; delete it to get a new one"
            written.problems.append(Problem(SECRET_MALFORMED, "Secret", name, message))
            return None
        return None if dep.spec.paused else await self._new_secrets(key, dep, written)

    async def _new_secrets(self, key: Key, dep: MMRouterDeployment, written: Written) -> SecretData | None:
        manifest = render_secret(dep, new_secret_data())
        ref = Ref.of(manifest)
        # Those of a resource of the same name before it do not count: their pods go anyway.
        lost = any(
            kind == "Deployment" and view.owner == dep.metadata.uid
            for (kind, _), view in self._cache.children(key).items()
        )
        try:
            live = await self._cluster.create(manifest)
        except AlreadyThere:
            existing = await self._cluster.get(ref)
            if existing is None:
                raise Conflict(f"Secret {ref.name} came and went") from None
            if taken(existing, dep.metadata.uid):
                problem = Problem(CHILD_NAME_TAKEN, "Secret", ref.name, f"Secret {ref.name} is not this resource's")
                written.problems.append(problem)
                written.later(LOOK_AGAIN)
                return None
            live, lost = existing, False
        self._cache.put("Secret", live)
        if lost:
            message = f"Secret {ref.name} was lost and is made anew: every pod restarts with new keys"
            self._recreated[key] = Problem(SECRET_RECREATED, "Secret", ref.name, message)
        try:
            return read_secret(live)
        except SecretError as error:
            written.problems.append(Problem(SECRET_MALFORMED, "Secret", ref.name, f"Secret {ref.name}: {error}"))
            return None

    def _snapshot(
        self, key: Key, resource: Mapping[str, Any], secrets: SecretData | None, missing: tuple[Missing, ...]
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

    async def _gates(self, dep: MMRouterDeployment, snapshot: Snapshot, written: Written) -> None:
        pods = {pod.uid: pod for pod in snapshot.pods}
        for uid, wanted in gates(dep, snapshot).items():
            pod = pods[uid]
            if any(pod.gates.get(gate, False) != value for gate, (value, _, _) in wanted.items()):
                try:
                    await self._cluster.apply_gates(pod, wanted)
                except (NotFound, Conflict) as error:
                    log.info("gates not set: %s", error, extra={"namespace": pod.namespace, "child": pod.name})
                    # Another pod of its name, or one that others write all the time: no news may come of the second.
                    written.later(GATES_AGAIN)
        self._wait_for_verification(dep, snapshot, written)

    def _wait_for_verification(self, dep: MMRouterDeployment, snapshot: Snapshot, written: Written) -> None:
        """Come back when a pod has had its time to be verified: nothing else happens at that moment.

        Also of a pod whose gates are open: its engine may have been restarted, and is to be proved again.
        """
        timeout = float(dep.spec.verification.timeout_seconds)
        for pod in snapshot.pods:
            proved = is_verified(told_of(pod, snapshot)) if pod.pool else True
            if pod.started is not None and not (proved and all(pod.gates.values())):
                left = pod.started + timeout - snapshot.now
                if left > 0:
                    written.later(left + 0.5)

    def _forget(self, key: Key) -> None:
        self._streams.forget(key)
        self._followed.pop(key, None)
        self._recreated.pop(key, None)
        self._failures.pop(key, None)
        self._unpublished.pop(key, None)
        self._metrics.ignored(key, ())
        self._children.forget(key)
        self._statuses.forget(key)


def _retry(error: ApiError, *, anew: bool = False) -> Retry:
    # What is not there: the resource or its namespace went away under our hands, and the watch tells.
    said = "not there any more" if isinstance(error, NotFound) else type(error).__name__
    return Retry(f"{said}: {error}", error.retry_after or 0.0, anew=anew)
