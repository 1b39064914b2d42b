"""Console: a web page that shows the live state of the swarm, and lets authorised users administer it. This package
decides what each viewer sees, which updates are sent, how often the broker is queried, and who may do what.

Deciding (pure): ``view`` builds one view from the broker's reports, with ``recent_metrics`` (rates, medians, time
series) and ``recoveries`` (phases, summaries); ``patch`` computes the difference between two views; ``broadcast``
numbers and buffers updates, so that readers can resume; ``polling`` decides which reports are queried when;
``commands`` parses commands and checks permissions. Acting: ``poller`` queries the broker and sends updates,
``local_swarm`` identifies and kills processes that the same ``swarm up`` started, ``logs`` reads their logs, and
``files`` serves the page in ``page/``. The routes are in ``routes/console``.

Nothing runs while no page is open.
"""
