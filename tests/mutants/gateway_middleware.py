"""Mutants of swarm/gateway/middleware."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="http-body-decoded-uncounted",
        breaks="The number of JSON values in a request body is not limited.",
        target="swarm.gateway.middleware.body:decode_body",
        old="if any(num_values > max_values for num_values in count_values(body)):",
        new="if any(num_values < 0 for num_values in count_values(body)):",
        caught_by="tests/unit/gateway/test_scan.py::test_too_many_values_are_refused_before_they_are_decoded",
    ),
    Mutant(
        name="http-two-lengths",
        breaks="A request with both Content-Length and Transfer-Encoding is served.",
        target="swarm.gateway.middleware.connection:BoundedConnection.next_event",
        old="""
        if isinstance(event, h11.Request) and {b"content-length", b"transfer-encoding"} <= dict(event.headers).keys():
        """,
        new="""
    if isinstance(event, h11.Request) and {b"content-length", b"transfer-encoding", b""} <= dict(event.headers).keys():
        """,
        caught_by="tests/integration/test_gateway_limits.py::test_malformed_requests_are_refused_with_4xx",
    ),
    Mutant(
        name="http-whole-heads-unbounded",
        breaks="A request head that arrives in one piece may have any size.",
        target="swarm.gateway.middleware.connection:BoundedConnection.next_event",
        old="if end is None:",
        new="if end is None and not _END_OF_HEAD.search(buffer):",
        caught_by="tests/integration/test_gateway_limits.py::test_a_long_head_is_431",
    ),
    Mutant(
        name="http-place-not-given-back",
        breaks="A request that fails keeps its place in its key's concurrency limit.",
        target="swarm.gateway.middleware.auth:AuthMiddleware._admit",
        old="""
            try:
                await self._forward(scope, headers, receive, send)
            finally:
                limiter.release(key.name)
        """,
        new="""
            await self._forward(scope, headers, receive, send)
            limiter.release(key.name)
        """,
        caught_by="tests/unit/gateway/test_guard.py::test_what_fails_behind_it_gives_its_place_back",
    ),
    Mutant(
        name="http-refused-pages-are-served",
        breaks="A gateway without keys serves pages of other origins.",
        target="swarm.gateway.middleware.auth:check_local",
        old="""
        if origin is not None and "*" not in origins and origin not in origins and not _is_loopback(_hostname(origin)):
        """,
        new="if origin is not None and origins and origin not in origins and not _is_loopback(_hostname(origin)):",
        caught_by="tests/unit/gateway/test_guard.py::test_without_keys_only_this_machine_is_served",
    ),
    Mutant(
        name="console-pages-from-elsewhere-order",
        breaks="The console accepts orders from a page of another origin.",
        target="swarm.gateway.middleware.auth:check_same_origin",
        old="if origin is not None and netloc_of(origin) != host.lower():",
        new="if origin is not None and not host:",
        caught_by="tests/unit/gateway/console/test_routes.py::test_pages_from_elsewhere_may_not_ask",
    ),
)
