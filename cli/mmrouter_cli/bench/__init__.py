"""`mmrouter bench`: send a load to any OpenAI-compatible endpoint and report latency and cache hits (docs/bench.md).

Pure: ``workload`` and ``traces`` (what is sent when), ``measure`` (figures of one run and of two), ``html_report``.
With I/O: ``load_client`` (HTTP), ``chat_request`` (one request), ``endpoint_probe``, ``run``, ``terminal``.
"""
