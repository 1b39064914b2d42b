"""Other servers: ``choice`` says which of them takes a request (pure), ``relay`` brings it there, its answer back."""
