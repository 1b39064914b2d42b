"""Who may come in from other machines, and what each may say there.

``identity``: a machine's own pair of keys; ``ownkeys``: the broker's, and how another one takes its place;
``invitation``: the line by which somebody comes in; ``roll``: who is known, as what, and who is invited (pure);
``file`` keeps the roll; ``possession``: proof that whoever enrols a key has its secret half (pure); ``rights``: what
each role may say (pure); ``whereabouts``: where a worker may be reached (pure); ``known``: which swarms this machine
has joined; ``rotation``: how its key there is changed. The doors themselves are the wire's.
"""
