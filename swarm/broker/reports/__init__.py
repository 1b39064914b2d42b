"""Reports: figures that are counted as the broker runs, and their conversion to JSON. Decides nothing.

In: each step as it was sent and answered, the time of each token, the end of each request. Out: values for JSON. Rules:
everything kept has a limit, whether or not it is read; clocks of different machines are never compared.

- ``statistics``: counts steps, waiting times of requests, and how requests end
- ``trace``: keeps where each token's time went
- ``scheduling``: the scheduler's last decision
- ``ended_requests``: reports about requests that are only in the journal
"""
