"""Routes with a module of their own; ``app`` has the others and assembles them. ``conversation`` is the common path of
all APIs with a single conversation."""
