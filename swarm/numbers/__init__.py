"""Numbers for those who watch a swarm: what Prometheus scrapes, and traces for OpenTelemetry.

``http`` counts what a gateway serves. ``catalogue`` names every figure of the swarm itself and says where it stands in
the broker's reports, ``families`` makes metrics of the two, ``exposition`` asks the broker and writes all of it as
Prometheus reads it. ``spans`` tells where a request's time went. ``docs/reference/metrics.md`` explains all names.

Labels are bounded: workers, parts, doors, outcomes, APIs and models; never a request or who sent it.
"""
