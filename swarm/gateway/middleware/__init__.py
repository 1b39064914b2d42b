"""ASGI middleware in front of the routes. ``rate_limiter`` decides how much a key may use (pure), ``auth``
authenticates callers, ``body`` reads bodies within bounds, ``connection`` bounds connections, ``security_headers``
protects the console's page, ``fast_path`` bypasses routing for common requests, and ``gateway_app`` assembles them."""
