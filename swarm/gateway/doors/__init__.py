"""Who comes in, with how much. ``limits`` decides what a key may use (pure), ``guard`` stands in front of the routes,
``body`` reads what is sent, ``connection`` bounds connections, ``lane`` is a short way to the routes; ``build`` puts
them together.
"""
