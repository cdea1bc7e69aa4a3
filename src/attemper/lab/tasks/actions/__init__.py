"""Actions in videos: sequences of features, one vector per step, with annotated segments."""
