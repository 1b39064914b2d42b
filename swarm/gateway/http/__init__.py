"""HTTP layer: ``handler`` runs completion jobs and returns their answers, ``sse`` streams them, ``json`` encodes, and
``state`` gives routes access to the application's objects."""
