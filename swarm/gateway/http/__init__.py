"""What is HTTP's own: ``counter`` brings answers to whoever asked, ``sse`` streams them, ``json`` encodes,
``state`` is what routes find in the application."""
