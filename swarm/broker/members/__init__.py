"""Members: workers join, beat, are judged, leave and are called back.

Comes in: what workers say, their beats, and that a connection is gone. Goes out: what they are told, and to
``recovery``, who is put out, with the evidence. Rules: one process has a name at a time; nobody is put out without
evidence; for a pause of the broker's own, or a message damaged on its way, nobody is blamed; who was put out and lives
may come again.

``entry`` takes a Hello and says who is let in, ``names`` under which name; ``roster`` hears what members say, and puts
them out. ``health`` has the table of evidence and verdicts and one pure ``judge``; ``vigil`` feeds it, and notices
steps that got lost though nobody died. ``blame`` finds out whether a worker or a request is to blame for a step that
raised. ``trust`` says whose word is believed, ``recheck`` has samples computed again by another, ``keyring`` says whose
keys the doors for beats and steps take. ``assets`` takes the model's files, ``hosts`` are asked to start more workers,
``doors`` close when descriptors run out.
"""
