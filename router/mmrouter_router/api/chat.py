"""The handler of the hot routes, which end in an engine: chats, completions, responses and the passed routes.

It runs the stages of docs/architecture.md without a framework and passes the engine's bytes through. A client that
disconnects aborts the request in the engine.
"""

import asyncio
import hmac
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar, get_args

from blake3 import blake3

from mmrouter_lib.api import quantity_bytes
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.passed_routes import PASSED_ROUTES, UNCACHED
from mmrouter_lib.engines.base.request_fields import RESPONSES
from mmrouter_lib.media_identity import to_wire
from mmrouter_router.admission.tenant_limits import Headers, TenantAdmission
from mmrouter_router.api.answers import (
    MESSAGE_ID,
    MESSAGE_PATHS,
    ConvertedSource,
    counted,
    debug_headers,
    engine_error,
    form_of,
    refuse,
    respond_converted,
    respond_json,
)
from mmrouter_router.api.request_metrics import RequestCounts
from mmrouter_router.core.errors import RequestError, is_exhausted
from mmrouter_router.core.request_ids import NAME_HEADER, RequestIds, client_name
from mmrouter_router.core.settings import Settings
from mmrouter_router.core.worker_threads import WorkerThreads
from mmrouter_router.dispatch.continued_stream import Continuations, ContinuedStream
from mmrouter_router.dispatch.forwarder import AttemptHistory, Forwarder
from mmrouter_router.dispatch.stages import ForwardCall
from mmrouter_router.dispatch.stored_responses import PREVIOUS, StoredResponses
from mmrouter_router.encoding.encoder_queue import Mode
from mmrouter_router.explain.decisions import DecisionLog, DecisionTrace, predicted_afterwards
from mmrouter_router.explain.log_lines import log_decision
from mmrouter_router.http.body_budget import BodyBudget, BodyReservation
from mmrouter_router.http.client_channel import AsgiClient, Client, ClientGoneError, Receive, Scope, Send
from mmrouter_router.http.engine_connection import UpstreamError
from mmrouter_router.intake import COUNT_TOKENS, PARSERS, ChatRequest, Limits, TemplateTraits
from mmrouter_router.intake.api_key_auth import Tenant, Tenants
from mmrouter_router.intake.json_body import Raw, work_size
from mmrouter_router.request.prepare import Preparer
from mmrouter_router.request.prepared import CHAT, Outgoing, OutgoingImage, Prepared
from mmrouter_router.scheduling.scoring import Policy
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_router.telemetry.tracing import Tracing, child_span, enter, failure_of, outcome, trace_context

log = logging.getLogger("mmrouter.chat")

BROKEN_OFF = "broken_off"  # the code of an answer that broke off
BACKGROUND = "background"
PRIORITY = "priority"  # removed: an engine compares the values of all tenants, so one tenant could overtake others
REQUEST_ID = "x-mmrouter-request-id"
CONTROL = b"x-mmrouter-control"
# With the control token: this request's policy and its mode of encoder scheduling, to compare them on the same engines.
POLICY, ENCODER_MODE = b"x-mmrouter-policy", b"x-mmrouter-encoder-mode"
_HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"server", b"date", b"x-request-id"})
_OF_STREAMS = _HOP_BY_HOP | {b"content-length"}  # token ids are removed from a stream, and its end may change


class Chat:
    """Handler of the routes that end in an engine."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        preparer: Preparer,
        forwarder: Forwarder,
        tracing: Tracing,
        threads: WorkerThreads,
        admission: TenantAdmission,
        stored: StoredResponses,
        *,
        adapters: Callable[[], frozenset[str]],
        needs_prompt: Callable[[str], bool],
        answered: Callable[[DecisionTrace, Prepared, Outgoing], None],
    ) -> None:
        """``adapters``: names of LoRA adapters that requests may give as their model. ``needs_prompt``: request id ->
        whether the prompt must be predicted; false only where placement does not depend on it. ``answered``: called
        after every complete answer, with the engine's request; must not block.
        """
        spec = settings.deployment.spec
        self._served_model, self._engine, self._loaded = settings.served_model, spec.engine.type, adapters
        self._adapter, self._limits = adapter(self._engine), Limits.of(spec.routing.media)
        key_folder, required = settings.config_dir / "api-keys", spec.frontend.api_keys is not None
        self.tenants = Tenants(key_folder, settings.identity_key, required=required)
        self._metrics, self._preparer, self._forwarder, self._tracing = metrics, preparer, forwarder, tracing
        of_template: dict[str, Any] = {"traits": TemplateTraits.of(preparer.prompter)}
        enabled, seeds, traits = spec.routing.continue_streams, spec.routing.seed_streams, settings.answer_traits
        self.stored = stored
        own: dict[str, Any] = {"modelled": preparer.models_responses, "chat_of": preparer.response_chat}
        own |= {"parses_tools": traits.tools, "stored": bool(stored.pools)}
        self._parsing = {**dict.fromkeys(MESSAGE_PATHS, of_template), RESPONSES: own}
        by_tokens = self._adapter.continuation
        self._continuations = Continuations(
            forwarder, metrics, threads, enabled=enabled, seeds=seeds, traits=traits, by_tokens=by_tokens
        )
        self._threads, self._admission, self.needs_prompt, self._answered = threads, admission, needs_prompt, answered
        self.decisions = DecisionLog()
        self.counts = RequestCounts(metrics)
        self.body_budget = BodyBudget(quantity_bytes(spec.frontend.max_held_bytes))
        self._ids = RequestIds(f"{settings.router_id}-")
        self._intake_seconds, self._prepare_seconds = (metrics.stage.labels(name) for name in ("intake", "prepare"))
        self._control_token = settings.control_token.encode()
        self.debug_headers = spec.observability.debug_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsgiClient(scope, receive, send) as client:
            await self.answer(client)

    async def answer(self, client: Client) -> None:
        """Answer one request; does not raise for faults of a client or an engine."""
        path = client.path
        request_id = self._ids()
        received = time.perf_counter()
        self._metrics.in_flight += 1
        span = self._tracing.request(client.method, path, client.headers)
        enter(span)
        code = "499"
        held = BodyReservation(self.body_budget, refuse=client.refuse_body)
        name = client_name(client.headers)
        extra = [(REQUEST_ID.encode(), request_id.encode()), (NAME_HEADER, name or request_id.encode())]
        if path in MESSAGE_PATHS:
            extra.append((MESSAGE_ID, extra[-1][1]))
        try:
            code = await self._admit(client, request_id, received, held, extra)
        except RequestError as error:
            code = str(error.status)
            self.counts.refused(error)
            await refuse(client, error, extra)
        except ClientGoneError:
            self._metrics.disconnects.inc()
        except asyncio.CancelledError:
            if not client.gone:
                code = BROKEN_OFF  # the router shuts down
                raise
            self._metrics.disconnects.inc()
        except UpstreamError as error:
            # The engine began to answer, so no retry is possible.
            log.warning("%s: answer broke off: %s", request_id, error)
            if client.begun:
                # Returning without completing the answer makes the server close the connection, by which the client
                # detects the truncation.
                code = BROKEN_OFF
            else:  # the router reads an error, and a message's answer, to its end first
                broken = RequestError.broken_off()
                code = str(broken.status)
                await refuse(client, broken, extra)
        except Exception as error:  # a bug, or memory or descriptors are exhausted
            failed = RequestError.exhausted() if is_exhausted(error) else RequestError.internal()
            code = str(failed.status)
            if client.begun:
                raise
            log.exception("%s: request failed", request_id)
            await refuse(client, failed, extra)
        finally:
            held.release()
            self._metrics.in_flight -= 1
            self.counts.ended(path, code, time.perf_counter() - received)
            if span:
                attributes, failure = outcome(code)
                span.set_attributes({"mmrouter.request_id": request_id, **attributes})
                if failure:
                    span.fail(failure)
                span.end()

    def tenant(self, api_key: str) -> Tenant:
        """Return the tenant of a key. Raises :class:`RequestError` (401)."""
        return self.tenants.authenticate([(b"authorization", f"Bearer {api_key}".encode())])

    async def prepare(self, path: str, raw: Raw, tenant: Tenant, *, predict: bool = True) -> Prepared:
        """Run the stages before placement, which a dry run explains. Raises :class:`RequestError`."""
        began = time.perf_counter()
        try:
            with child_span("intake"):
                request = await self._threads.run(tenant.name, work_size(raw), self._parse, path, raw)
            holder = self.stored.holder_of_previous(request, tenant)
            if request.stored and request.body.get(BACKGROUND) and self._admission.is_concurrency_limited(tenant.name):
                message = "a limit on concurrent requests cannot count one whose end is not seen"
                raise RequestError.invalid(
                    f"'{BACKGROUND}': {message}.", param=BACKGROUND, code="unsupported_parameter"
                )
            if tenant.salt is not None and request.body.pop(PRIORITY, None) is not None:
                request.removed = (*request.removed, PRIORITY)
        finally:
            parsed = time.perf_counter()
            self._intake_seconds.observe(parsed - began)
        try:
            prepared = await self._preparer.prepare(request, tenant.salt, tenant.name, predict=predict)
            prepared.holder = "" if holder is None else holder.member.uid
            prepared.pools = self.stored.pools if request.stored else frozenset()
            return prepared
        finally:
            self._prepare_seconds.observe(time.perf_counter() - parsed)

    async def describe(self, trace: DecisionTrace) -> dict[str, Any]:
        """Return a logged decision as JSON, with its prompt predicted now if it was not."""
        unseen = trace.unpredicted
        if unseen is None or not unseen.raw:
            return trace.as_json()
        try:
            request = await self._threads.run("", work_size(unseen.raw), self._parse, unseen.endpoint, unseen.raw)
            prepared = await self._preparer.predict(request, unseen.images, unseen.salt)
        except RequestError:  # the engine refused it, too
            return trace.as_json()
        return predicted_afterwards(trace, prepared)

    def _parse(self, path: str, raw: Raw) -> ChatRequest:
        if path in PASSED_ROUTES:
            return PARSERS[path](raw, self._limits, self._served_model, self._engine)
        arguments = raw, self._limits, self._loaded() | {self._served_model}, self._engine
        request = PARSERS[path](*arguments, **self._parsing.get(path, {}))
        if request.model != self._served_model and request.endpoint not in self._adapter.adapter_endpoints:
            message = f"Engines answer {path} without adapters; {CHAT} serves them."
            raise RequestError.invalid(message, param="model", code="unsupported_value")
        return request

    async def _admit(
        self, client: Client, request_id: str, received: float, held: BodyReservation, extra: Headers
    ) -> str:
        """Answer a request within its tenant's limits. Adds to ``extra``, the headers of every answer."""
        if client.method != "POST":
            raise RequestError.method_not_allowed(client.method, client.path)
        tenant = self.tenants.authenticate(client.headers)
        held.tenant = tenant.name
        with self._admission.admit(tenant.name) as permit:
            extra += permit.headers
            try:
                code = await self._answer(client, tenant, request_id, received, held, extra)
            except RequestError as error:
                if error.code == "queue_full":
                    error.headers["Retry-After"] = str(permit.retry_seconds)
                raise
            permit.answered(self._admission.now())
            return code

    async def _answer(
        self, client: Client, tenant: Tenant, request_id: str, received: float, held: BodyReservation, extra: Headers
    ) -> str:
        path, headers = client.path, client.headers
        if path in PASSED_ROUTES:
            self._require_route(path, tenant)
        with child_span("receive") as span:
            raw = await client.body(self._limits.max_request_bytes, held)
            if span:
                span.set_attributes({"http.request.body.size": len(raw)})
        trusted = self._trusted(headers)
        policy = _chosen(headers, POLICY, get_args(Policy)) if trusted else None
        mode = _chosen(headers, ENCODER_MODE, get_args(Mode)) if trusted else None
        shown = trusted or self.debug_headers
        predict = shown or path == COUNT_TOKENS or self.needs_prompt(request_id)
        prepared = await self.prepare(path, raw, tenant, predict=predict)
        if path == COUNT_TOKENS:
            await respond_json(client, 200, extra, counted(prepared))
            return "200"
        fetched = sum(4 * len(image.media.data) // 3 for image in prepared.images if image.media.source != "data")
        if fetched:  # the engine's body holds it as base64, as a data: URI does
            held.grow(held.size + fetched)
            held.complete()
        in_turn = partial(self._threads.run, tenant.name, prepared.request.work_size)
        outgoing = await in_turn(partial(self._outgoing, prepared, tenant.name, repeatable=client.gateway is None))
        sent = trace_context(headers) | ({} if outgoing.form is None else {"content-type": outgoing.form[0]})
        named = partial(in_turn, partial(_fingerprint, prepared))
        call = ForwardCall(request_id, prepared, outgoing, sent, named, policy, tenant.name, None, mode, client.gateway)
        if prepared.request.stored:
            call.stored_as = partial(self.stored.ids.make, request_id, tenant=tenant.name)
        past = AttemptHistory()
        stream: ContinuedStream | None = None
        reply = await self._forwarder.send(call, past)
        try:
            self.decisions.add(request_id, reply.trace, client_name(headers).decode())
            log_decision(reply.trace)
            self.counts.answered(prepared, reply, time.perf_counter() - received)
            if shown:
                extra += debug_headers(reply)
            if reply.answer.status >= 400:
                raw = await reply.error_text()
                field_of, hidden = self._adapter.prompt_error_field, {reply.decision.target.worker.member.name}
                hidden.add(reply.trace.answers)
                if prepared.holder and reply.answer.status == 404:
                    raise self.stored.absent(prepared.request.body[PREVIOUS], PREVIOUS)
                rewrite = partial(engine_error, prepared.request, reply.answer.status, raw, field_of, hidden)
                await refuse(client, await self._threads.run(tenant.name, len(raw), rewrite), extra)
            else:
                dropped = _OF_STREAMS if reply.is_stream else _HOP_BY_HOP
                passed = [(n, v) for n, v in reply.answer.headers if n not in dropped]
                form = form_of(path, prepared)
                if reply.is_stream:
                    stream = self._continuations.open(call, past, reply, self.decisions.add)
                    source = stream if form is None else ConvertedSource(stream, form.stream())
                    await client.stream(200, passed + extra, source.first, source)
                    if stream.failed:
                        return BROKEN_OFF
                    reply = stream.reply
                elif form is not None:
                    await respond_converted(client, reply, form, extra, partial(self._threads.run, tenant.name))
                else:
                    await client.stream(reply.answer.status, passed + extra, reply.first, reply.answer)
                if not prepared.request.body.get(BACKGROUND):  # else its prompt may not be computed yet
                    self._answered(reply.trace, prepared, outgoing)
            return str(reply.answer.status)
        except BaseException as error:
            (reply if stream is None else stream.reply).span.fail(failure_of(error))
            raise
        finally:
            (reply if stream is None else stream).close()

    def _require_route(self, path: str, tenant: Tenant) -> None:
        """Raise 404 unless an engine serves a passed route for this tenant."""
        self._forwarder.without_route(path)
        if tenant.salt is not None and path not in UNCACHED | self._adapter.salted_routes:
            # Without a salt a tenant could find out from cache hits what another tenant sent.
            raise RequestError(404, f"{path} is not served with API keys.", code="route_not_served")

    def _outgoing(self, prepared: Prepared, tenant: str, repeatable: bool = True) -> Outgoing:
        path = prepared.request.endpoint
        images = tuple(
            OutgoingImage(i.message, i.part, to_wire(i.identity), i.media, i.tokens)
            for i in (prepared.images if path == CHAT else ())
            if i.modality == "image"
        )
        if path in PASSED_ROUTES:
            for name in prepared.request.removed:
                self._metrics.stripped.labels(name).inc()
            salt = {} if prepared.salt is None or path in UNCACHED else {"cache_salt": prepared.salt}
            return Outgoing(path, {**prepared.request.body, **salt}, form=prepared.request.form)
        rewrites = [image.rewrite() for image in images]
        embedded = [image for image in prepared.images if path != CHAT or image.modality != "image"]
        rewrites += prepared.timed_rewrites()
        rewritten = self._adapter.rewrite_chat(
            prepared.request.body,
            rewrites,
            model=self._served_model,
            cache_salt=prepared.salt,
            adapter=prepared.adapter,
        )
        for name in {*rewritten.removed, *prepared.request.removed}:
            self._metrics.stripped.labels(name).inc()
        way, added = self._continuations.plan(path, rewritten.body) if repeatable else (None, {})
        copied = sum(len(image.media.data) for image in images if not image.media.text)
        copied += sum(len(image.media.data) for image in embedded)
        run = partial(self._threads.run, tenant, copied + prepared.request.text_size)
        return Outgoing(path, {**rewritten.body, **added}, images, way=way, run=run)

    def _trusted(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Return whether the request has the control token, with which it may see overlap and choose its policy.

        A wrong token is counted and otherwise ignored.
        """
        given = [value for name, value in headers if name == CONTROL]
        if not given:
            return False
        trusted = any(hmac.compare_digest(value, self._control_token) for value in given)
        if not trusted:
            self._metrics.control_refusals.labels("header").inc()
        return trusted


def _fingerprint(prepared: Prepared) -> bytes:
    """Return the hash by which the quarantine recognises a tenant's request; identities stand for extracted images."""
    hasher = blake3((prepared.salt or "").encode())
    hasher.update(prepared.request.source)
    for image in prepared.images:
        hasher.update(image.identity)
    return hasher.digest()


Chosen = TypeVar("Chosen", bound=str)


def _chosen(headers: Iterable[tuple[bytes, bytes]], name: bytes, values: tuple[Chosen, ...]) -> Chosen | None:
    wanted = next((value.decode("latin-1") for header, value in headers if header == name), None)
    if wanted is None:
        return None
    for value in values:
        if value == wanted:
            return value
    field = name.decode()
    raise RequestError.invalid(f"'{field}' is {wanted!r}, and must be one of {', '.join(values)}.", param=field)
