"""Other servers (upstreams): ``pool`` chooses the one that takes a request (pure), ``proxy`` forwards the request and
returns its answer."""
