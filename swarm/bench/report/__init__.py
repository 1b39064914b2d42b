"""Reports from a run's document: a table for terminals (``table``), an HTML page (``page``, with ``plots`` and
``style``), and the display during a run (``live``). ``format`` formats figures."""
