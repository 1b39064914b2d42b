"""Actors: the production cores of broker, workers and clients with simulated shells."""
