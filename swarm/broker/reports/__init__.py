"""Reports: what is counted on the way, and how it is told. Decides nothing.

``statistics`` counts steps, what requests wait for and how they end, ``trace`` keeps where each token's time went,
``scheduling`` tells what the scheduler decided last, ``ended`` makes values of requests that only the journal has.
"""
