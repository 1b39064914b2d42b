"""The desk: where asks become requests of the swarm, and tokens become the parts of answers.

``desk`` is what the counter talks to; ``served`` is the model as the gateway knows it; ``prompts`` makes token ids;
``parts`` makes text, calls and ends of pieces (pure); ``reading`` is an answer under way.
"""
