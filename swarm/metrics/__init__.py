"""Observability of a swarm: metrics for Prometheus, and traces for OpenTelemetry.

``http`` counts what a gateway serves. ``catalogue`` lists every figure of the swarm itself and its place in the
broker's reports, ``collectors`` turns both into metrics, ``exposition`` queries the broker and writes everything in
Prometheus' format. ``tracing`` exports where a request's time went. All names are explained in
``docs/reference/metrics.md``.

Labels are bounded: workers, parts, listeners, outcomes, APIs and models; never a request or its client.
"""
