"""Reports of a run's document: a table for people (``table``), a page to show around (``page``, with the plots of
``plots`` and ``style``), and what is shown while it runs (``live``). ``words`` writes figures for people."""
