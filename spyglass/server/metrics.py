"""Numbers for Prometheus, under vLLM's names where it has them, so that its dashboards work; ours begin `spyglass:`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from spyglass.engine.worker import WorkerStats
from spyglass.server.log import Record

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_DELAYS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_TICK_SECONDS = 0.05
_OLD_NAMES = {  # for one version more
    "spyglass:images": "spyglass:pictures",
    "spyglass:image_tokens": "spyglass:picture_tokens",
    "spyglass:num_requests_in_flight": "spyglass:answers_under_way",
    "spyglass:num_requests_waiting_for_memory": "spyglass:answers_without_memory",
    "spyglass:grammar_mask_overlap_ratio": "spyglass:grammar_mask_hidden_ratio",
}
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """The numbers of one server, in a registry of its own. `read` gives the state of the engine's thread."""

    def __init__(self, model: str, read: Callable[[], WorkerStats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineNumbers(model, read))
        self._model = model
        counter = partial(Counter, registry=self._registry)
        histogram = partial(Histogram, registry=self._registry)
        late = "how late the event loop runs what is due, looked at 20 times a second"
        self._delay = histogram("spyglass:event_loop_delay_seconds", late, buckets=_DELAYS)
        self._first = self._times("vllm:time_to_first_token_seconds", "from request to first token", _SECONDS)
        self._whole = self._times("vllm:e2e_request_latency_seconds", "from request to last token", _SECONDS)
        self._pace = self._times("vllm:request_time_per_output_token_seconds", "mean of an answer", _TOKEN_SECONDS)
        self._prompt = self._total("vllm:prompt_tokens", "tokens of prompts")
        self._generated = self._total("vllm:generation_tokens", "tokens of answers")
        about = "images of answered requests", "tokens of images"
        named = "spyglass:images", "spyglass:image_tokens"
        self._images, self._image_tokens = map(self._total, named, about)
        self._old_names = [self._total(_OLD_NAMES[name], f"old name of {name}") for name in named]
        ended = "model_name", "finished_reason"
        self._ended = counter("vllm:request_success", "answers by how they ended", ended)
        self._requests = counter("spyglass:http_requests", "requests by path and status", ("path", "status"))
        counted = dict.fromkeys(("prompt_tokens", "generation_tokens", "images"), ("key",))
        self._by_key = {
            what: counter(f"spyglass:key_{what}", f"{what.replace('_', ' ')} by API key", labels)
            for what, labels in {"requests": ("key", "status"), **counted}.items()
        }
        first = "from request to first token by API key"
        self._first_by_key = histogram("spyglass:key_time_to_first_token_seconds", first, ("key",), buckets=_SECONDS)

    def _total(self, name: str, about: str) -> Counter:
        return Counter(name, about, ("model_name",), registry=self._registry).labels(self._model)

    def _times(self, name: str, about: str, buckets: Sequence[float]) -> Histogram:
        found = Histogram(name, about, ("model_name",), registry=self._registry, buckets=buckets)
        return found.labels(self._model)

    def count(self, record: Record, path: str) -> None:
        """Add one answered request; `path` is its route's, so that strangers cannot make up series."""
        self._requests.labels(path, record.status).inc()
        if record.key is not None:
            self._by_key["requests"].labels(record.key, record.status).inc()
            self._by_key["prompt_tokens"].labels(record.key).inc(record.prompt_tokens)
            self._by_key["generation_tokens"].labels(record.key).inc(record.completion_tokens)
            self._by_key["images"].labels(record.key).inc(record.images)
            if record.first_token_s is not None:
                self._first_by_key.labels(record.key).observe(record.first_token_s)
        if not record.answers:
            return
        self._prompt.inc(record.prompt_tokens)
        self._generated.inc(record.completion_tokens)
        for total, more in zip(self._old_names, (record.images, record.image_tokens), strict=True):
            total.inc(more)
        self._images.inc(record.images)
        self._image_tokens.inc(record.image_tokens)
        for reason in record.finish:
            self._ended.labels(self._model, reason).inc()
        self._whole.observe(record.total_s)
        if record.first_token_s is not None:
            self._first.observe(record.first_token_s)
            each = record.completion_tokens / record.answers
            if each > 1:
                self._pace.observe((record.total_s - record.first_token_s) / (each - 1))

    async def watch_loop(self) -> None:
        """Observe the event loop until cancelled: nothing on it may take long, since every stream waits meanwhile."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _TICK_SECONDS
            await asyncio.sleep(_TICK_SECONDS)
            self._delay.observe(loop.time() - due)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _EngineNumbers(Collector):
    """What the engine counts itself, read when somebody asks."""

    def __init__(self, model: str, read: Callable[[], WorkerStats]) -> None:
        self._model, self._read = model, read

    def collect(self) -> Iterator[Metric]:
        stats = self._read()
        engine = stats.engine
        for name, about, value in (
            ("spyglass:num_requests_in_flight", "queued and running answers", stats.live),
            ("vllm:num_requests_running", "answers that the engine runs", engine.running),
            ("vllm:num_requests_waiting", "answers that wait for the engine", stats.live - engine.running),
            ("vllm:kv_cache_usage_perc", "used share of the fullest pool of rows, 0 to 1", engine.cache_share),
            ("spyglass:num_requests_waiting_for_memory", "answers in the engine's own queue", engine.waiting),
            (
                "spyglass:grammar_mask_overlap_ratio",
                "part of the time for grammar masks that went by during forward passes",
                engine.mask_share,
            ),
            ("spyglass:prefix_cache_bytes", "what the prefix cache holds", engine.prefix_bytes),
            ("spyglass:image_cache_bytes", "what the image cache holds", engine.image_bytes),
        ):
            told = {name: about} | ({_OLD_NAMES[name]: f"old name of {name}"} if name in _OLD_NAMES else {})
            for spelling, text in told.items():
                gauge = GaugeMetricFamily(spelling, text, labels=("model_name",))
                gauge.add_metric((self._model,), max(0, value))
                yield gauge
        for name, about, value in (
            ("vllm:num_preemptions", "answers put off for lack of memory", engine.preemptions),
            ("vllm:prefix_cache_queries", "prompt tokens looked up", engine.prefix_queries),
            ("vllm:prefix_cache_hits", "prompt tokens found", engine.prefix_hits),
            ("spyglass:image_cache_queries", "images looked up", engine.image_queries),
            ("spyglass:image_cache_hits", "images found", engine.image_hits),
            ("spyglass:prefix_cache_evictions", "prefixes that had to go", engine.prefix_evictions),
            ("spyglass:image_cache_evictions", "images that had to go", engine.image_evictions),
            ("spyglass:computed_tokens", "tokens run through the model", engine.computed_tokens),
            ("spyglass:steps", "steps of the engine", engine.steps),
            ("spyglass:failed_steps", "steps that failed", stats.failed_steps),
        ):
            counter = CounterMetricFamily(name, about, labels=("model_name",))
            counter.add_metric((self._model,), value)
            yield counter
