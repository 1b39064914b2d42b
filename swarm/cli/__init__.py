"""``swarm``: the commands that run things. ``app`` lists them; what each needs is imported when it is called."""
