"""`mmrouter bench`: load for any OpenAI-compatible endpoint, and what came of it (docs/bench.md).

Pure: ``workload`` and ``traces`` (what is asked, when), ``drawing`` (its words and pictures), ``measure`` (answers to
figures), ``compare``, ``report``, ``page``. With I/O: ``asking`` (one request), ``endpoint`` (what is at a URL),
``driving`` (when requests go out), ``run`` (all of it), ``live`` (progress).
"""
