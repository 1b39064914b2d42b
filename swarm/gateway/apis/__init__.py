"""The APIs that are spoken: a module each. A body becomes asks, parts become JSON; pure."""
