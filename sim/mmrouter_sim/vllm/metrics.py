"""``/metrics`` with vLLM's names and labels (docs/engine-facts/vllm.md#metrics), read at each scrape.

It has the metrics that the simulator can fill: load, prefix and processor cache, tokens, latency, geometry.
"""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mmrouter_sim.core.request import Request
from mmrouter_sim.encoder_engine import ImageEncoder
from mmrouter_sim.media import ProcessorCache
from mmrouter_sim.rank_loop import Runner
from mmrouter_sim.settings import Settings
from mmrouter_sim.vllm.connectors import ConnectorTransfers

_LABELS = ("model_name", "engine")
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class VllmMetrics(Collector):
    """The metrics of one process, one set of samples per data-parallel rank."""

    def __init__(
        self,
        settings: Settings,
        runners: Sequence[Runner],
        images: ProcessorCache,
        handover: ConnectorTransfers,
        encoder: ImageEncoder | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self._settings = settings
        self._runners = runners
        self._images = images
        self._handover, self._encoder = handover, encoder
        self._model = settings.served_names[0]
        self._first_token = self._histogram("time_to_first_token_seconds", "Time to the first token")
        self._between = self._histogram("inter_token_latency_seconds", "Time between two tokens of an answer")
        self._queue = self._histogram("request_queue_time_seconds", "Time spent waiting")
        self._prefill = self._histogram("request_prefill_time_seconds", "Time from the first step to the first token")
        self._whole = self._histogram("e2e_request_latency_seconds", "Time from arrival to the last token")
        self.registry.register(self)

    def _histogram(self, name: str, text: str) -> Histogram:
        histogram = Histogram(f"vllm:{name}", text, _LABELS, buckets=_SECONDS, registry=self.registry)
        for rank in range(len(self._runners)):
            histogram.labels(self._model, str(rank))
        return histogram

    def token(self, rank: int, request: Request, now: float, last: float | None) -> None:
        """Record a token of a request; ``last``: time of the token before."""
        labels = (self._model, str(rank))
        if last is not None:
            self._between.labels(*labels).observe(now - last)
            return
        started = request.arrived if request.started is None else request.started
        self._first_token.labels(*labels).observe(now - request.arrived)
        self._queue.labels(*labels).observe(started - request.arrived)
        self._prefill.labels(*labels).observe(now - started)

    def ended(self, rank: int, request: Request, now: float) -> None:
        """Record the end of a request."""
        self._whole.labels(self._model, str(rank)).observe(now - request.arrived)

    def collect(self) -> Iterator[Metric]:
        yield from self._load()
        yield from self._caches()
        yield from self._totals()
        yield from self._handovers()
        if self._runners:
            yield self._geometry()

    def _load(self) -> Iterator[Metric]:
        running = self._gauge("num_requests_running", "Requests in the running batch")
        waiting = self._gauge("num_requests_waiting", "Requests waiting to run")
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Requests waiting to run, by reason", labels=(*_LABELS, "reason")
        )
        usage = self._gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1")
        for rank, runner in enumerate(self._runners):
            labels, scheduler = [self._model, str(rank)], runner.scheduler
            running.add_metric(labels, len(scheduler.running))
            waiting.add_metric(labels, len(scheduler.waiting))
            reasons.add_metric([*labels, "capacity"], len(scheduler.waiting))
            reasons.add_metric([*labels, "deferred"], 0)
            usage.add_metric(labels, scheduler.pool.usage)
        if self._encoder is not None:
            running.add_metric([self._model, "0"], self._encoder.running)
            waiting.add_metric([self._model, "0"], self._encoder.waiting)
        yield from (running, waiting, reasons, usage)

    def _caches(self) -> Iterator[Metric]:
        queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        for rank, runner in enumerate(self._runners):
            queries.add_metric([self._model, str(rank)], runner.scheduler.counters.prefix_queries)
            hits.add_metric([self._model, str(rank)], runner.scheduler.counters.prefix_hits)
        # One processor serves all ranks; its metrics have rank 0, or they would be counted twice.
        looked = self._counter("mm_cache_queries", "Images looked up in the processor cache")
        found = self._counter("mm_cache_hits", "Images found in the processor cache")
        looked.add_metric([self._model, "0"], self._images.queries)
        found.add_metric([self._model, "0"], self._images.hits)
        yield from (queries, hits, looked, found)

    def _totals(self) -> Iterator[Metric]:
        prompt = self._counter("prompt_tokens", "Prompt tokens processed")
        generated = self._counter("generation_tokens", "Tokens generated")
        preemptions = self._counter("num_preemptions", "Preemptions")
        sources = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where they came from", labels=(*_LABELS, "source")
        )
        ended = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason", labels=(*_LABELS, "finished_reason")
        )
        for rank, runner in enumerate(self._runners):
            labels, counters = [self._model, str(rank)], runner.scheduler.counters
            prompt.add_metric(labels, counters.prompt_tokens)
            generated.add_metric(labels, counters.generation_tokens)
            preemptions.add_metric(labels, counters.preemptions)
            sources.add_metric([*labels, "local_cache_hit"], counters.prefix_hits)
            computed = counters.prefix_queries - counters.prefix_hits - counters.external_hits
            sources.add_metric([*labels, "local_compute"], computed)
            sources.add_metric([*labels, "external_kv_transfer"], counters.external_hits)
            for reason, count in counters.finished.items():
                ended.add_metric([*labels, reason], count)
        yield from (prompt, generated, preemptions, sources, ended)

    def _handovers(self) -> Iterator[Metric]:
        """Transfers between engines; ``mmrouter_sim_visual_tokens`` is the simulator's own."""
        hits = self._counter("external_prefix_cache_hits", "Prompt tokens whose blocks another engine computed")
        expired = self._counter("nixl_num_kv_expired_reqs", "Requests whose blocks were not fetched in time")
        failed = self._counter("nixl_num_failed_transfers", "Failed transfers")
        encoded = CounterMetricFamily("mmrouter_sim_visual_tokens", "Visual tokens encoded here", labels=_LABELS)
        for rank, runner in enumerate(self._runners):
            labels = [self._model, str(rank)]
            hits.add_metric(labels, runner.scheduler.counters.external_hits)
            encoded.add_metric(labels, runner.scheduler.counters.visual_tokens)
        expired.add_metric([self._model, "0"], self._handover.expired)
        failed.add_metric([self._model, "0"], self._handover.failed)
        if self._encoder is not None:
            encoded.add_metric([self._model, "0"], self._encoder.visual_tokens)
        yield from (hits, expired, failed, encoded)

    def _geometry(self) -> Metric:
        settings = self._settings
        info = None
        for rank, runner in enumerate(self._runners):
            limits = runner.scheduler.limits
            values = {
                "block_size": limits.block_size,
                "cache_dtype": "auto",
                "enable_prefix_caching": settings.prefix_caching,
                "engine": rank,
                "hash_block_size": limits.block_size,
                "kv_cache_size_tokens": (limits.blocks - 1) * limits.block_size,
                "num_gpu_blocks": limits.blocks,
                "num_gpu_blocks_override": settings.blocks,
                "prefix_caching_hash_algo": settings.hash_algorithm,
            }
            if info is None:
                info = GaugeMetricFamily("vllm:cache_config_info", "Geometry of the KV cache", labels=tuple(values))
            info.add_metric([str(value) for value in values.values()], 1)
        assert info is not None, "a process has at least one rank"
        return info

    def _gauge(self, name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)

    def _counter(self, name: str, text: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
