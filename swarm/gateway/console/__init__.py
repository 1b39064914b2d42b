"""The console: one page that shows the swarm as it is, and gives orders to those who may. It decides what is shown to
whom, what is told anew, how often the broker is asked, and who may do what.

Deciding (pure): ``view`` makes one view of the broker's reports, with ``figures`` (rates, medians, series) and
``recoveries`` (phases, sentences); ``patch`` says what is different between two views; ``audience`` numbers what is
told, remembers it and lets readers go on; ``pace`` says what is asked when; ``orders`` reads what is wanted, and who
may. Doing: ``watch`` asks and tells, ``household`` knows the processes beside the gateway and kills, ``logs``
reads their logs, ``files`` holds the page, which lies in ``page/``. Its routes are ``routes/console``.

Nothing of it runs while nobody looks.
"""
