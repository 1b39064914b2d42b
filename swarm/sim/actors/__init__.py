"""Who plays: the production cores of broker, workers and clients with their simulated shells."""
