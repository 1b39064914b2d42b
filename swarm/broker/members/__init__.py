"""Members: workers join, beat, are judged, leave and are called back.

``roster`` is their door, ``entry`` says who is let in. ``health`` has the table of evidence and verdicts and one pure
``judge``; ``vigil`` feeds it; ``lost_steps`` notices what got lost though nobody died.
``trust`` says whose word is believed, ``recheck`` has samples computed again by another. ``assets`` takes the model's
files, ``hosts`` are asked to start more workers, ``doors`` close when descriptors run out. Who is put out is told to
``recovery``.
"""
