"""Reports: what is counted on the way, and how it is told. Decides nothing.

Comes in: each step as it was sent and answered, each token's moment, each request's end. Goes out: values for JSON.
Rules: what is kept has a bound, whether or not anybody asks; clocks of different machines are never compared.

``statistics`` counts steps, what requests wait for and how they end, ``trace`` keeps where each token's time went,
``scheduling`` tells what the scheduler decided last, ``ended`` makes values of requests that only the journal has.
"""
