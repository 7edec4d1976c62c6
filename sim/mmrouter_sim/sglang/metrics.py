"""``/metrics`` with SGLang's names and labels (docs/engine-facts/sglang.md#http-endpoints), read at each scrape."""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mmrouter_sim.core.request import Request
from mmrouter_sim.encoder_engine import ImageEncoder
from mmrouter_sim.media import ProcessorCache
from mmrouter_sim.rank_loop import Runner
from mmrouter_sim.settings import Settings

_SECONDS = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0)


class SglangMetrics(Collector):
    """The metrics of one process. With several ranks, samples have the label ``dp_rank``."""

    def __init__(
        self,
        settings: Settings,
        runners: Sequence[Runner],
        _images: ProcessorCache,
        encoder: ImageEncoder | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self._settings, self._runners, self._encoder = settings, runners, encoder
        self._names = ("model_name", "engine_type", "tp_rank", "pp_rank", *(("dp_rank",) if len(runners) > 1 else ()))
        self._first_token = self._histogram("time_to_first_token_seconds", "Time to the first token")
        self._queue = self._histogram("queue_time_seconds", "Time spent waiting")
        self._whole = self._histogram("e2e_request_latency_seconds", "Time from arrival to the last token")
        self.registry.register(self)

    def token(self, rank: int, request: Request, now: float, last: float | None) -> None:
        """Record a token of a request; ``last``: time of the token before."""
        if last is None:
            started = request.arrived if request.started is None else request.started
            self._first_token.labels(*self._labels(rank)).observe(now - request.arrived)
            self._queue.labels(*self._labels(rank)).observe(started - request.arrived)

    def ended(self, rank: int, request: Request, now: float) -> None:
        """Record the end of a request."""
        self._whole.labels(*self._labels(rank)).observe(now - request.arrived)

    def collect(self) -> Iterator[Metric]:
        if self._encoder is not None:
            files = CounterMetricFamily("sglang:encoder_cache_total_files", "Images requested", labels=["modality"])
            hits = CounterMetricFamily("sglang:encoder_cache_hit_files", "Images in the cache", labels=["modality"])
            files.add_metric(["image"], self._encoder.images)
            hits.add_metric(["image"], self._encoder.hits)
            yield from (files, hits)
            return
        size = self._settings.block_size
        running = self._gauge("num_running_reqs", "Running requests")
        waiting = self._gauge("num_queue_reqs", "Requests in the waiting queue")
        usage = self._gauge("token_usage", "Share of the token slots in use, 0 to 1")
        used = self._gauge("num_used_tokens", "Token slots in use")
        room = self._gauge("max_total_num_tokens", "Token slots")
        page = self._gauge("page_size", "Tokens per page")
        prompt = self._counter("prompt_tokens", "Prompt tokens processed")
        cached = self._counter("cached_tokens", "Prompt tokens found in the cache")
        generated = self._counter("generation_tokens", "Tokens generated")
        for rank, runner in enumerate(self._runners):
            labels, scheduler = self._labels(rank), runner.scheduler
            running.add_metric(labels, len(scheduler.running))
            waiting.add_metric(labels, len(scheduler.waiting))
            usage.add_metric(labels, scheduler.pool.usage)
            used.add_metric(labels, scheduler.pool.used * size)
            room.add_metric(labels, (scheduler.pool.size - 1) * size)
            page.add_metric(labels, size)
            prompt.add_metric(labels, scheduler.counters.prompt_tokens)
            cached.add_metric(labels, scheduler.counters.prefix_hits)
            generated.add_metric(labels, scheduler.counters.generation_tokens)
        yield from (running, waiting, usage, used, room, page, prompt, cached, generated)

    def _labels(self, rank: int) -> list[str]:
        return [self._settings.served_names[0], "unified", "0", "0", *([str(rank)] if len(self._runners) > 1 else [])]

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"sglang:{name}", text, self._names, buckets=_SECONDS, registry=self.registry)

    def _gauge(self, name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"sglang:{name}", text, labels=self._names)

    def _counter(self, name: str, text: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"sglang:{name}", text, labels=self._names)
