"""Supported HTTP APIs, one module each: turn a body into completion requests, and the parts of an answer into JSON.
Pure."""
