"""The desk: where asks become requests of the swarm, and tokens become the parts of answers.

``desk`` is what the counter talks to, and makes token ids; ``served`` is the model as the gateway knows it; ``parts``
makes text, calls and ends of pieces (pure); ``reading`` is an answer under way.
"""
