"""Members: workers join, beat, are judged, leave and are called back.

``entry`` takes a Hello and says who is let in, ``names`` under which name; ``roster`` hears what members say, and puts
them out. ``health`` has the table of evidence and verdicts and one pure ``judge``; ``vigil`` feeds it, and notices
steps that got lost though nobody died. ``trust`` says whose word is believed, ``recheck`` has samples computed again by
another. ``assets`` takes the model's files, ``hosts`` are asked to start more workers, ``doors`` close when descriptors
run out. Who is put out is told to ``recovery``.
"""
