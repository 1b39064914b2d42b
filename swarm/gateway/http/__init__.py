"""What is HTTP's own: ``counter`` brings answers to whoever asked, ``sse`` streams them, ``json`` encodes."""
