"""Who comes in, with how much. ``limits`` decides what a key may use (pure), ``guard`` stands in front of the routes,
``body`` reads what is sent, ``connection`` bounds connections; ``build`` puts them together.
"""
