"""Steps: who joins the next one, and who has room for keys and values.

``scheduler`` forms a batch of sequences that need a token and prompts that want in, and admits those who wait;
``room`` says who gives way when there is not enough. A step is in flight from its dispatch until the last stage has
answered; ``scheduler`` says what counts from then on.
"""
